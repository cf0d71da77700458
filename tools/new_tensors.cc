#include "new_tensors.h"

#include <algorithm>
#include <string>

namespace polyhead::tools {

Status too_large(double size_bytes) {
  return {StatusCode::kOutOfMemory, "not enough memory: this problem needs " +
                                        std::to_string(static_cast<int64_t>(std::min(size_bytes, 0x1p80) / 0x1p20)) +
                                        " MiB; choose smaller sizes"};
}

Status NewTensors::add(DType dtype, std::initializer_list<int64_t> dims, std::initializer_list<int> order,
                       Tensor& tensor) {
  tensor = {};
  tensor.dtype = dtype;
  tensor.ndim = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), tensor.dims);
  double extent = 1;
  int64_t step = 1;
  for (const int* d = order.end(); d != order.begin();) {
    const int dim = *--d;
    tensor.strides[dim] = step;
    extent += static_cast<double>(step) * static_cast<double>(std::max<int64_t>(tensor.dims[dim] - 1, 0));
    if (extent > 0x1p46) return too_large(extent * static_cast<double>(dtype_size_bytes(dtype)));
    step *= std::max<int64_t>(tensor.dims[dim], 1);
  }
  const size_t size_bytes = static_cast<size_t>(extent) * dtype_size_bytes(dtype);
  buffers_.push_back(new_buffer(size_bytes));
  if (buffers_.back() == nullptr) return too_large(static_cast<double>(size_bytes));
  tensor.data = buffers_.back().get();
  return {};
}

Status NewTensors::add(DType dtype, std::initializer_list<int64_t> dims, Tensor& tensor) {
  static constexpr std::initializer_list<int> kOrders[] = {{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}};
  return add(dtype, dims, kOrders[dims.size() - 1], tensor);
}

Status NewTensors::add(const CaptureShape& shape, Tensor& tensor) {
  const int64_t* n = shape.dims;
  switch (shape.ndim) {
    case 1: return add(shape.dtype, {n[0]}, tensor);
    case 2: return add(shape.dtype, {n[0], n[1]}, tensor);
    case 3: return add(shape.dtype, {n[0], n[1], n[2]}, tensor);
    default: return add(shape.dtype, {n[0], n[1], n[2], n[3]}, tensor);
  }
}

}  // namespace polyhead::tools
