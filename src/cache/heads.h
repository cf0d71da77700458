// Rows of keys or values where they lie, in a cache or beside it, as floats: read, and stored rounded.
#pragma once

#include <algorithm>
#include <cmath>

#include "contract/decoding.h"
#include "core/dtype.h"
#include "polyhead/tensor.h"

namespace polyhead {

// Where head `h` of token i begins, in a [n, heads, dim] tensor or in the pool.
struct Heads {
  const Tensor& tensor;
  int64_t page_size = 0;           // 0: a [n, heads, dim] tensor
  const Tensor* scales = nullptr;  // of a dtype that has some, in the pool

  int64_t at(int64_t i, int64_t h) const { return at(tensor, i, h); }
  int64_t at(const Tensor& t, int64_t i, int64_t h) const {
    const int64_t* s = t.strides;
    if (page_size == 0) return i * s[0] + h * s[1];
    return i / page_size * s[0] + i % page_size * s[1] + h * s[2];
  }
  int64_t stride() const { return tensor.strides[tensor.ndim - 1]; }
  int64_t heads() const { return tensor.dims[tensor.ndim - 2]; }
  int64_t dim() const { return tensor.dims[tensor.ndim - 1] * (tensor.dtype == DType::kInt4x2 ? 2 : 1); }

  // Of kInt4x2, and all else that has scales, an element is a byte.
  char* row(int64_t i, int64_t h) const {
    return static_cast<char*>(tensor.data) + at(i, h) * static_cast<int64_t>(dtype_size_bytes(tensor.dtype));
  }
  int64_t groups() const { return scales->dims[scales->ndim - 1]; }
  int64_t scale_at(int64_t i, int64_t h, int64_t group) const {
    return at(*scales, i, h) + group * scales->strides[scales->ndim - 1];
  }
};

inline void load(const Heads& from, int64_t i, int64_t h, float* x) {
  const int64_t stride = from.stride(), dim = from.dim();
  if (from.scales != nullptr) {
    const int64_t group = std::max<int64_t>(dim / from.groups(), 1);
    for (int64_t d = 0; d < dim; ++d) {
      const double scale = load_element(from.scales->data, from.scales->dtype, from.scale_at(i, h, d / group));
      x[d] = static_cast<float>(load_stored(from.row(i, h), from.tensor.dtype, d, stride)) * static_cast<float>(scale);
    }
    return;
  }
  with_element_type(from.tensor.dtype, [&]<class E>(E) {
    const E* const elements = reinterpret_cast<const E*>(from.row(i, h));
    for (int64_t d = 0; d < dim; ++d) x[d] = widen<float>(elements[d * stride]);
  });
}

// Number d of a row, which has no scale yet or is divided by it.
inline void store_number(char* row, DType dtype, int64_t d, int64_t stride, float number) {
  if (dtype == DType::kFloat8E4M3) row[d * stride] = static_cast<char>(to_float8_e4m3(number).bits);
  if (dtype == DType::kFloat8E5M2) row[d * stride] = static_cast<char>(to_float8_e5m2(number).bits);
  if (dtype != DType::kInt8 && dtype != DType::kInt4x2) return;
  const int whole = static_cast<int>(std::nearbyint(number));
  if (dtype == DType::kInt8) row[d * stride] = static_cast<char>(whole);
  if (dtype != DType::kInt4x2) return;
  char& pair = row[d / 2 * stride];
  pair = static_cast<char>(d % 2 == 0 ? (pair & 0xf0) | (whole & 15) : (pair & 15) | whole * 16);
}

// A group's scale is its largest magnitude over the dtype's; NaN, if one of its numbers is NaN or inf.
inline double scale_of(const float* x, int64_t group, DType dtype) {
  float largest = 0, no_number = 0;
  for (int64_t d = 0; d < group; ++d) {
    largest = std::max(largest, std::fabs(x[d]));
    no_number += x[d] - x[d];  // 0 or NaN
  }
  return static_cast<double>(no_number == 0 ? largest : no_number) / static_cast<double>(largest_stored(dtype));
}

inline void store(const float* x, const Heads& to, int64_t i, int64_t h) {
  const int64_t stride = to.stride(), dim = to.dim();
  if (to.scales != nullptr) {
    const int64_t groups = to.groups(), group = dim / groups;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = to.scale_at(i, h, g);
      store_element(to.scales->data, to.scales->dtype, at, scale_of(x + g * group, group, to.tensor.dtype));
      const auto scale = static_cast<float>(load_element(to.scales->data, to.scales->dtype, at));
      const bool divides = scale > 0 && std::isfinite(scale);
      for (int64_t d = g * group; d < (g + 1) * group; ++d) {
        const float most = largest_stored(to.tensor.dtype);  // a subnormal scale is rounded by much
        const float number = divides ? std::clamp(x[d] / scale, -most, most) : 0;
        store_number(to.row(i, h), to.tensor.dtype, d, stride, number);
      }
    }
    return;
  }
  with_element_type(to.tensor.dtype, [&]<class E>(E) {
    E* const elements = reinterpret_cast<E*>(to.row(i, h));
    for (int64_t d = 0; d < dim; ++d) elements[d * stride] = narrow<E>(x[d]);
  });
}

}  // namespace polyhead
