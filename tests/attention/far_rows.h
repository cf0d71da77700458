// Rows of a tensor far apart in memory.
#pragma once

#include <sys/mman.h>

#include <cstring>

#include "testing/operands.h"

namespace polyhead::testing {

// Rows 2^31 elements apart, in memory of which few pages exist: offsets need 64 bits.
class FarRows {
 public:
  static constexpr int64_t kStride = (int64_t{1} << 31) + 1;

  FarRows(const Array& a) : tensor_(view(a)) {  // [1, rows, 1, dim]
    element_ = static_cast<int64_t>(dtype_size_bytes(a.dtype));
    bytes_ = static_cast<size_t>((a.dims[1] * kStride) * element_);
    void* map = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    tensor_.data = map == MAP_FAILED ? nullptr : map;
    tensor_.strides[1] = kStride;
    for (int64_t i = 0; tensor_.data && i < a.dims[1]; ++i) std::memcpy(row(i), &a.bytes[i * row_bytes()], row_bytes());
  }
  FarRows(const FarRows&) = delete;
  ~FarRows() {
    if (tensor_.data) munmap(tensor_.data, bytes_);
  }

  const Tensor& tensor() const { return tensor_; }
  uint8_t* row(int64_t i) const { return static_cast<uint8_t*>(tensor_.data) + i * kStride * element_; }
  size_t row_bytes() const { return static_cast<size_t>(tensor_.dims[3] * element_); }

 private:
  Tensor tensor_;
  int64_t element_;
  size_t bytes_;
};

}  // namespace polyhead::testing
