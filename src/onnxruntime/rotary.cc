#include "rotary.h"

#include <algorithm>

#include "core/dtype.h"
#include "core/rotary.h"
#include "core/sentence.h"

namespace polyhead::onnxruntime {
namespace {

constexpr size_t kCos = 7, kSin = 8, kPositions = 9;

struct Turn {
  const Rotary* rotary;
  Tensor from, to;  // [batch, sequence, heads, dim]
  int pieces;

  template <class E>
  void row(int64_t b, int64_t s) const {
    const int64_t pairs = rotary->cos.dims[1], dim = from.dims[3];
    const int64_t position = static_cast<const int64_t*>(rotary->positions.data)[b * from.dims[1] + s];
    const Angles<E> cos{static_cast<const E*>(rotary->cos.data) + position * pairs};
    const Angles<E> sin{static_cast<const E*>(rotary->sin.data) + position * pairs};
    for (int64_t h = 0; h < from.dims[2]; ++h) {
      const E* x = static_cast<const E*>(from.data) + b * from.strides[0] + s * from.strides[1] + h * from.strides[2];
      E* y = static_cast<E*>(to.data) + b * to.strides[0] + s * to.strides[1] + h * to.strides[2];
      rotate(pairs, rotary->interleaved, cos, sin, x, y);
      std::copy(x + 2 * pairs, x + dim, y + 2 * pairs);
    }
  }

  void run(int piece) const {
    const int64_t rows = from.dims[0] * from.dims[1];
    for (int64_t row_at = rows * piece / pieces; row_at < rows * (piece + 1) / pieces; ++row_at) {
      with_element_type(from.dtype,
                        [&](auto zero) { row<decltype(zero)>(row_at / from.dims[1], row_at % from.dims[1]); });
    }
  }
};

}  // namespace

Status read_rotary(Call& call, const Tensor& query, const Tensor& before, Rotary& rotary) {
  Tensor given;
  Status status = call.input(kCos, rotary.cos);
  if (status.ok()) status = call.input(kSin, rotary.sin);
  if (status.ok()) status = call.input(kPositions, given);
  const int64_t batch = query.dims[0], sequence = query.dims[1];
  if (status.ok()) status = call.scratch(DType::kInt64, {batch, sequence}, rotary.positions);
  if (!status.ok()) return status;
  const Tensor &cos = rotary.cos, &sin = rotary.sin;
  if (cos.ndim != 2 || sin.ndim != 2 || cos.dims[0] != sin.dims[0] || cos.dims[1] != sin.dims[1] ||
      cos.dtype != query.dtype || sin.dtype != query.dtype || 2 * cos.dims[1] > query.dims[3]) {
    return invalid(sentence("cos_cache is ", words_of(cos), " and sin_cache ", words_of(sin), ", must be ",
                            dtype_name(query.dtype), " [positions, at most ", query.dims[3] / 2, "]"));
  }
  if (given.given() &&
      (given.dtype != DType::kInt64 || given.ndim != 2 || given.dims[0] != batch || given.dims[1] != sequence)) {
    return invalid(sentence("position_ids is ", words_of(given), ", must be int64 [", batch, ", ", sequence, "]"));
  }
  for (int64_t at = 0; at < batch * sequence; ++at) {
    const int64_t counted = static_cast<const int64_t*>(before.data)[at / sequence] + at % sequence;
    const int64_t position = given.given() ? static_cast<const int64_t*>(given.data)[at] : counted;
    if (position < 0 || position >= cos.dims[0]) {
      return invalid(sentence("the position of query ", at % sequence, " is ", position, ", cos_cache has ",
                              cos.dims[0], " rows"));
    }
    static_cast<int64_t*>(rotary.positions.data)[at] = position;
  }
  return {};
}

Status turn(Call& call, const Rotary& rotary, Tensor& x) {
  constexpr int64_t kWorthAThread = 1 << 14;  // elements
  Tensor turned;
  const Status status = call.scratch(x.dtype, {x.dims[0], x.dims[1], x.dims[2], x.dims[3]}, turned);
  if (!status.ok() || turned.num_elements() == 0) return status;
  Turn job{&rotary, x, turned, 1};
  job.pieces = static_cast<int>(std::min<int64_t>(x.num_elements() / kWorthAThread + 1, call.executor().num_threads()));
  call.executor().parallel_for(
      job.pieces, [](void* self, int i) { static_cast<const Turn*>(self)->run(i); }, &job);
  x = turned;
  return {};
}

}  // namespace polyhead::onnxruntime
