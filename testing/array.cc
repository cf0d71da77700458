#include "testing/array.h"

#include <algorithm>

namespace polyhead::testing {

Array::Array(DType type, std::vector<int64_t> sizes) : dtype(type), dims(std::move(sizes)) {
  bytes.resize(static_cast<size_t>(size()) * dtype_size_bytes(dtype));
}

int64_t Array::size() const {
  int64_t count = given() ? 1 : 0;
  for (int64_t d : dims) count *= d;
  return count;
}

int64_t Array::index(const std::vector<int64_t>& at) const {
  int64_t n = 0;
  for (size_t d = 0; d < dims.size(); ++d) n = n * dims[d] + at[d];
  return n;
}

Tensor view(const Array& array) {
  Tensor t;
  t.data = const_cast<uint8_t*>(array.bytes.data());
  t.dtype = array.dtype;
  t.ndim = static_cast<int32_t>(array.dims.size());
  int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    t.dims[i] = array.dims[static_cast<size_t>(i)];
    t.strides[i] = stride;
    stride *= std::max<int64_t>(t.dims[i], 1);
  }
  return t;
}

Array rows(const Array& a, int64_t first, int64_t last) {
  if (!a.given()) return {};
  Array part;
  part.dtype = a.dtype;
  part.dims = a.dims;
  part.dims[0] = last - first;
  const int64_t row_bytes = a.dims[0] == 0 ? 0 : static_cast<int64_t>(a.bytes.size()) / a.dims[0];
  part.bytes.assign(a.bytes.begin() + first * row_bytes, a.bytes.begin() + last * row_bytes);
  return part;
}

}  // namespace polyhead::testing
