// Where a tensor's elements lie.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "polyhead/tensor.h"

namespace polyhead {

// Bytes from the first to the last element, as t.data sees them.
struct Reach {
  int64_t first = 0, end = 0;

  size_t bytes() const { return static_cast<size_t>(end - first); }
};

// Of one element of the dims before `dim`.
inline Reach reach_of(const Tensor& t, int dim = 0) {
  const auto element = static_cast<int64_t>(dtype_size_bytes(t.dtype));
  Reach reach{0, element};
  for (int n = dim; n < t.ndim; ++n) {
    const int64_t bytes = (t.dims[n] - 1) * t.strides[n] * element;
    (bytes < 0 ? reach.first : reach.end) += bytes;
  }
  return reach;
}

inline void add_parts(const Tensor& t, int dim, int64_t at, std::vector<Reach>* parts) {
  constexpr int64_t kMost = 16 << 20;
  const Reach reach = reach_of(t, dim);
  auto held = static_cast<int64_t>(dtype_size_bytes(t.dtype));
  for (int n = dim; n < t.ndim; ++n) held *= t.dims[n];
  if (reach.end - reach.first <= std::max(kMost, held) || dim == t.ndim) {
    parts->push_back({at + reach.first, at + reach.end});
    return;
  }
  const int64_t step = t.strides[dim] * static_cast<int64_t>(dtype_size_bytes(t.dtype));
  for (int64_t n = 0; n < t.dims[dim]; ++n) add_parts(t, dim + 1, at + n * step, parts);
}

// All of a tensor that has elements, with what lies between them; where that is much, for there may be no memory, in parts.
inline std::vector<Reach> parts_of(const Tensor& t) {
  std::vector<Reach> parts;
  add_parts(t, 0, 0, &parts);
  return parts;
}

}  // namespace polyhead
