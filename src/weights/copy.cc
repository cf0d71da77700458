// One weight from one view to another.
#include <algorithm>

#include "core/dtype.h"
#include "weights/weights.h"

namespace polyhead::stored {
namespace {

constexpr int kMaxLoops = 4;  // [in, heads, 2, head_dim / 2]

struct Loop {
  int64_t size = 1, from = 0, to = 0;  // strides
};

int64_t magnitude(int64_t stride) { return stride < 0 ? -stride : stride; }

// `t` with its dims split as those of `fine` are.
Tensor split_like(const Tensor& t, const Tensor& fine) {
  if (t.ndim >= fine.ndim) return t;
  Tensor split = fine;
  split.data = t.data;
  split.dtype = t.dtype;
  int i = t.ndim - 1;
  int64_t rest = t.dims[i], stride = t.strides[i];
  for (int j = fine.ndim - 1; j >= 0; --j) {
    split.strides[j] = stride;
    rest /= fine.dims[j];
    if (rest > 1) stride *= fine.dims[j];
    if (rest == 1 && i > 0) {
      rest = t.dims[--i];
      stride = t.strides[i];
    }
  }
  return split;
}

// move(from, to) for all elements, by their offsets. Writes run along the target's smallest stride, reads along the
// source's, in blocks that keep both in cache: most of these copies are transpositions.
template <class Move>
void for_each_element(std::array<Loop, kMaxLoops> loops, const Move& move) {
  std::sort(loops.begin(), loops.end(), [](const Loop& a, const Loop& b) {
    if ((a.size == 1) != (b.size == 1)) return a.size == 1;
    return magnitude(a.to) > magnitude(b.to);
  });
  const auto nearest = std::min_element(loops.begin(), loops.end() - 1, [](const Loop& a, const Loop& b) {
    return a.size > 1 && (b.size == 1 || magnitude(a.from) < magnitude(b.from));
  });
  std::swap(*nearest, loops[kMaxLoops - 2]);
  constexpr int64_t kBlock = 32;
  const Loop &a = loops[0], &b = loops[1], &rows = loops[2], &columns = loops[3];
  for (int64_t n = 0; n < a.size * b.size; ++n) {
    const int64_t from = n / b.size * a.from + n % b.size * b.from, to = n / b.size * a.to + n % b.size * b.to;
    for (int64_t i0 = 0; i0 < rows.size; i0 += kBlock) {
      const int64_t i1 = std::min(rows.size, i0 + kBlock);
      for (int64_t j0 = 0; j0 < columns.size; j0 += kBlock) {
        const int64_t j1 = std::min(columns.size, j0 + kBlock);
        for (int64_t i = i0; i < i1; ++i) {
          for (int64_t j = j0; j < j1; ++j) {
            move(from + i * rows.from + j * columns.from, to + i * rows.to + j * columns.to);
          }
        }
      }
    }
  }
}

template <class Bits>
void move_bits(const Tensor& from, const Tensor& to, const std::array<Loop, kMaxLoops>& loops) {
  const auto* in = static_cast<const Bits*>(from.data);
  auto* out = static_cast<Bits*>(to.data);
  for_each_element(loops, [&](int64_t i, int64_t o) { out[o] = in[i]; });
}

}  // namespace

void copy_weight(const Tensor& from, const Tensor& to) {
  if (from.num_elements() == 0) return;
  const Tensor source = split_like(from, to), target = split_like(to, from);
  std::array<Loop, kMaxLoops> loops;
  for (int i = 0; i < source.ndim; ++i) {
    if (source.dims[i] > 1) loops[static_cast<size_t>(i)] = {source.dims[i], source.strides[i], target.strides[i]};
  }
  if (from.dtype == to.dtype) {
    switch (dtype_size_bytes(from.dtype)) {
      case 2: return move_bits<uint16_t>(from, to, loops);
      case 4: return move_bits<uint32_t>(from, to, loops);
      default: return move_bits<uint64_t>(from, to, loops);
    }
  }
  with_element_type(from.dtype, [&]<class From>(From) {
    with_element_type(to.dtype, [&]<class To>(To) {
      const auto* in = static_cast<const From*>(from.data);
      auto* out = static_cast<To*>(to.data);
      for_each_element(loops, [&](int64_t i, int64_t o) { out[o] = narrow<To>(widen<double>(in[i])); });
    });
  });
}

}  // namespace polyhead::stored
