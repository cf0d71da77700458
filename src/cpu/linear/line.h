// Vectors of elements along one axis of a matrix: of any dtype, at any strides.
#pragma once

#include "cpu/isa/rows.h"
#include "cpu/linear/functions.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// One row of a matrix, or one column: what lies along `axis` from element `first` on.
struct Line {
  void* data = nullptr;  // null: not given
  DType dtype = DType::kFloat32;
  int64_t first = 0;
  const Axis* axis = nullptr;
  float* plain = nullptr;  // the elements, where they are floats side by side
};

inline bool one_dim(const Axis& axis) { return axis.sizes[0] == 1 && axis.sizes[1] == 1; }

inline Line line_of(const Matrix& x, int64_t first, const Axis& axis) {
  const bool plain = x.data != nullptr && x.dtype == DType::kFloat32 && contiguous(axis);
  return {x.data, x.dtype, first, &axis, plain ? static_cast<float*>(x.data) + first : nullptr};
}
inline Line row_of(const Matrix& x, int64_t row) { return line_of(x, offset_of(x.rows, row), x.columns); }
inline Line column_of(const Matrix& x, int64_t column) { return line_of(x, offset_of(x.columns, column), x.rows); }

// Whether elements [at, at + n) lie at equal distances axis.strides[2].
inline bool equal_steps(const Axis& axis, int64_t at, int n) {
  return one_dim(axis) || at % axis.sizes[2] + n <= axis.sizes[2];
}

// Elements [at, at + n), n <= kLanes, as floats; lanes behind them are 0.
inline F load_line(const Line& x, int64_t at, int n) {
  if (x.plain != nullptr) return n == kLanes ? load(x.plain + at) : load_first(x.plain + at, n);
  const Axis& axis = *x.axis;
  if (equal_steps(axis, at, n)) {
    return load_elements(x.data, x.dtype, x.first + offset_of(axis, at), axis.strides[2], n);
  }
  alignas(64) float buffer[kLanes] = {}, element[kLanes];
  for (int i = 0; i < n; ++i) {
    store(element, load_elements(x.data, x.dtype, x.first + offset_of(axis, at + i), 1, 1));
    buffer[i] = element[0];
  }
  return load(buffer);
}

inline void store_line(const Line& x, int64_t at, F value, int n) {
  if (x.plain != nullptr) return n == kLanes ? store(x.plain + at, value) : store_first(x.plain + at, value, n);
  const Axis& axis = *x.axis;
  if (equal_steps(axis, at, n)) {
    return store_elements(x.data, x.dtype, x.first + offset_of(axis, at), axis.strides[2], value, n);
  }
  alignas(64) float buffer[kLanes];
  store(buffer, value);
  for (int i = 0; i < n; ++i) {
    store_elements(x.data, x.dtype, x.first + offset_of(axis, at + i), 1, broadcast(buffer[i]), 1);
  }
}

// `x` as a store to `dtype` would leave it.
inline F rounded(F x, DType dtype) {
  if (dtype == DType::kFloat32) return x;
  alignas(32) uint16_t buffer[kLanes];
  store_elements(buffer, dtype, 0, 1, x, kLanes);
  return load_elements(buffer, dtype, 0, 1, kLanes);
}

// Words [word, word + n), of elements below `end`; an element behind it counts as 0.
template <class Mac>
inline F load_line_words(const Line& x, int64_t word, int n, int64_t end) {
  if constexpr (Mac::kElements == 1) {
    return load_line(x, word, n);
  } else {
    const Axis& axis = *x.axis;
    const int64_t at = 2 * word;
    const int count = end - at < 2 * n ? static_cast<int>(end - at) : 2 * n;
    const uint16_t* source = u16(x.data) + x.first;
    if (axis.strides[2] == 1 && count == 2 * n && equal_steps(axis, at, count)) {
      return load_first(reinterpret_cast<const float*>(source + offset_of(axis, at)), n);
    }
    alignas(64) uint16_t buffer[2 * kLanes] = {};
    for (int i = 0; i < count; ++i) buffer[i] = source[offset_of(axis, at + i)];
    return load(reinterpret_cast<const float*>(buffer));
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
