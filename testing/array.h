// A dense row-major array of any dtype.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "polyhead/tensor.h"
#include "testing/elements.h"

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
  double at(int64_t n) const { return element_value(dtype, bytes.data() + byte(n)); }
  void set(int64_t n, double value) { set_element(dtype, bytes.data() + byte(n), value); }
  bool operator==(const Array&) const = default;  // bit for bit

  // Sets all elements, in row-major order.
  template <class Next>
  void fill(Next next) {
    for (int64_t n = 0, count = size(); n < count; ++n) set(n, next());
  }

 private:
  size_t byte(int64_t n) const { return static_cast<size_t>(n) * dtype_size_bytes(dtype); }
};

// All elements as T (double or float), in row-major order.
template <class T>
std::vector<T> numbers(const Array& a) {
  std::vector<T> x(static_cast<size_t>(a.size()));
  bool floating = false;
  with_element_type(a.dtype, [&](auto type) {
    const auto* element = reinterpret_cast<const decltype(type)*>(a.bytes.data());
    for (size_t n = 0; n < x.size(); ++n) x[n] = widen<T>(element[n]);
    floating = true;
  });
  for (size_t n = 0; n < x.size() && !floating; ++n) x[n] = static_cast<T>(a.at(static_cast<int64_t>(n)));
  return x;
}

// The elements of a float64 array where they lie; none if it is not given.
inline std::span<const double> doubles(const Array& a) {
  return {reinterpret_cast<const double*>(a.bytes.data()), static_cast<size_t>(a.size())};
}

// Rows [first, last) of dim 0.
Array rows(const Array& a, int64_t first, int64_t last);

// A contiguous view.
Tensor view(const Array& array);

}  // namespace polyhead::testing
