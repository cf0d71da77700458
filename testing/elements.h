// One element of any dtype as a number, and all elements of a strided tensor in row-major order.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "polyhead/tensor.h"

namespace polyhead::testing {

// int64 beyond 2^53 is rounded.
inline double element_value(DType dtype, const void* element) {
  switch (dtype) {
    case DType::kBool: return *static_cast<const uint8_t*>(element);
    case DType::kInt32: return *static_cast<const int32_t*>(element);
    case DType::kInt64: return static_cast<double>(*static_cast<const int64_t*>(element));
    default: return load_element(element, dtype, 0);
  }
}

inline void set_element(DType dtype, void* element, double value) {
  switch (dtype) {
    case DType::kBool: *static_cast<uint8_t*>(element) = value != 0; break;
    case DType::kInt32: *static_cast<int32_t*>(element) = static_cast<int32_t>(value); break;
    case DType::kInt64: *static_cast<int64_t*>(element) = static_cast<int64_t>(value); break;
    default: store_element(element, dtype, 0, value);
  }
}

// Calls visit(void* element) for every element.
template <class Visit>
void for_each_element(const Tensor& tensor, Visit visit) {
  if (tensor.num_elements() == 0) return;
  const auto size_bytes = static_cast<int64_t>(dtype_size_bytes(tensor.dtype));
  const int last = tensor.ndim - 1;
  int64_t index[Tensor::kMaxDims] = {};
  int64_t row = 0;  // offset of the first element of the innermost row
  while (true) {
    for (int64_t i = 0; i < tensor.dims[last]; ++i) {
      visit(static_cast<void*>(static_cast<char*>(tensor.data) + (row + i * tensor.strides[last]) * size_bytes));
    }
    int d = last - 1;
    for (; d >= 0; --d) {
      row += tensor.strides[d];
      if (++index[d] < tensor.dims[d]) break;
      row -= tensor.dims[d] * tensor.strides[d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

// All elements, in row-major order.
inline std::vector<double> element_values(const Tensor& tensor) {
  std::vector<double> values;
  values.reserve(static_cast<size_t>(tensor.num_elements()));
  for_each_element(tensor, [&](const void* element) { values.push_back(element_value(tensor.dtype, element)); });
  return values;
}

}  // namespace polyhead::testing
