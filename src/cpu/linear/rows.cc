// What moves or adds rows without multiplying: sequences without their padding, sums over heads, zeros.
#include <algorithm>
#include <cstring>

#include "contract/sequences.h"
#include "core/dtype.h"
#include "cpu/linear/tasks.h"

namespace polyhead::cpu {
namespace {

// The longest of a sequence's lengths [batch, beam].
int64_t longest(const linear::CopyRowsArgs& args, int64_t b, int64_t n) {
  int64_t length = 0;
  for (const Tensor& t : args.lengths) {
    if (!t.given()) continue;
    Tensor beam = t;
    if (t.dims[1] > 1) {
      beam.data = static_cast<char*>(t.data) + n * t.strides[1] * static_cast<int64_t>(dtype_size_bytes(t.dtype));
    }
    length = std::max(length, integer_at(beam, b));
  }
  return length;
}

}  // namespace

Status copy_rows(const linear::CopyRowsArgs& args, const Run& run) {
  const Matrix &x = args.x, &y = args.y;
  const int64_t beams = x.rows.sizes[1], steps = x.rows.sizes[2], size = x.columns.size();
  const size_t element = dtype_size_bytes(x.dtype), row_bytes = static_cast<size_t>(size) * element;
  const bool together = x.columns.sizes[0] * x.columns.sizes[1] == 1 && (size == 1 || x.columns.strides[2] == 1);
  run_tasks(run, x.rows.sizes[0] * beams, [&](int64_t sequence, int) {
    const int64_t length = std::clamp<int64_t>(longest(args, sequence / beams, sequence % beams), 0, steps);
    char* to = static_cast<char*>(y.data) + static_cast<size_t>(sequence * steps) * row_bytes;
    for (int64_t t = 0; t < length; ++t, to += row_bytes) {
      const char* row =
          static_cast<const char*>(x.data) + x.rows.offset(sequence * steps + t) * static_cast<int64_t>(element);
      if (together) {
        std::memcpy(to, row, row_bytes);
        continue;
      }
      for (int64_t c = 0; c < size; ++c) {
        std::memcpy(to + static_cast<size_t>(c) * element, row + x.columns.offset(c) * static_cast<int64_t>(element),
                    element);
      }
    }
    if (length < steps) std::memset(to, 0, static_cast<size_t>(steps - length) * row_bytes);
  });
  return {};
}

Status sum_heads(const linear::SumHeadsArgs& args, const Run& run) {
  const Matrix &x = args.x, &y = args.y;
  const int64_t size = y.columns.size();
  const int64_t step = size > 1 ? x.columns.offset(1) : 0;  // within a head
  with_element_type(y.dtype, [&]<class E>(E) {
    run_tasks(run, y.rows.size(), [&](int64_t row, int) {
      const E* in = static_cast<const E*>(x.data) + x.rows.offset(row);
      E* out = static_cast<E*>(y.data) + y.rows.offset(row);
      for (int64_t n = 0; n < size; ++n) {
        E& element = out[y.columns.offset(n)];
        double sum = args.accumulate ? widen<double>(element) : 0;
        for (int64_t h = 0; h < args.num_heads; ++h) {
          sum += widen<double>(in[x.columns.offset(h * size) + n * step]);
        }
        element = narrow<E>(sum);
      }
    });
  });
  return {};
}

Status clear(void* data, size_t bytes, const Run&) {
  if (bytes > 0) std::memset(data, 0, bytes);
  return {};
}

}  // namespace polyhead::cpu
