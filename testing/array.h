// A dense row-major array of any dtype.
#pragma once

#include <cstdint>
#include <vector>

#include "polyhead/tensor.h"

namespace polyhead::testing {

struct Array {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> dims;  // empty: not given
  std::vector<uint8_t> bytes;

  Array() = default;
  Array(DType type, std::vector<int64_t> sizes);  // zeros
  bool given() const { return !dims.empty(); }
  int64_t size() const;
  int64_t index(const std::vector<int64_t>& at) const;
  double at(int64_t n) const;
  void set(int64_t n, double value);
  bool operator==(const Array&) const = default;  // bit for bit

  // Sets all elements, in row-major order.
  template <class Next>
  void fill(Next next) {
    for (int64_t n = 0, count = size(); n < count; ++n) set(n, next());
  }
};

// Rows [first, last) of dim 0.
Array rows(const Array& a, int64_t first, int64_t last);

// A contiguous view.
Tensor view(const Array& array);

}  // namespace polyhead::testing
