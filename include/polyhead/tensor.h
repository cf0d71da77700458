// A view of an array that somebody else owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "polyhead/api.h"

namespace polyhead {

enum class DType : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kFloat64 = 3,
  kBool = 4,  ///< one byte, 0 or 1
  kInt32 = 5,
  kInt64 = 6,
  // Of keys and values in a cache alone, which scales go with (AttentionDesc::key_dtype):
  kInt8 = 7,
  kFloat8E4M3 = 8,  ///< 4 bits of exponent, 3 of fraction, at most 448, NaN and no inf (torch.float8_e4m3fn)
  kFloat8E5M2 = 9,  ///< 5 and 2, at most 57344, NaN and inf (torch.float8_e5m2)
  kInt4x2 = 10,     ///< two of -8 to 7 in a byte, as one element: the first of them in the low four bits
};

enum class Device : int32_t { kCpu = 0, kCuda = 1 };

/// Bytes of one element.
constexpr size_t dtype_size_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64: return 8;
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kBFloat16:
    case DType::kFloat16: return 2;
    case DType::kBool:
    case DType::kInt8:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kInt4x2: return 1;
  }
  return 0;
}

/// "float32", "bfloat16", ...
POLYHEAD_API const char* dtype_name(DType dtype);
POLYHEAD_API const char* device_name(Device device);

/// Non-owning view: pointer, dtype, device, dims, strides. Strides count elements, not bytes, and may be anything
/// (0 and negative too) on inputs. The elements of an output or a gradient must lie apart, those of an output in
/// ascending order. A default Tensor (ndim 0) means "not given". Inputs are never written through `data`.
struct Tensor {
  static constexpr int kMaxDims = 5;

  void* data = nullptr;  ///< element [0, 0, ...]; may be null only where some dim is 0
  DType dtype = DType::kFloat32;
  Device device = Device::kCpu;
  int32_t ndim = 0;
  int64_t dims[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};

  Tensor() = default;

  /// A contiguous (row-major) view of `sizes`, at most kMaxDims of them; more make a tensor that counts as not given.
  Tensor(const void* elements, DType type, std::initializer_list<int64_t> sizes)
      : data(const_cast<void*>(elements)), dtype(type) {
    if (sizes.size() > kMaxDims) return;
    ndim = static_cast<int32_t>(sizes.size());
    int i = 0;
    for (int64_t size : sizes) dims[i++] = size;
    int64_t stride = 1;
    for (i = ndim - 1; i >= 0; --i) {
      strides[i] = stride;
      if (__builtin_mul_overflow(stride, dims[i] > 0 ? dims[i] : 1, &stride)) stride = INT64_MAX;
    }
  }

  bool given() const { return ndim > 0; }

  /// The product of the dims; INT64_MAX where that is beyond an int64.
  int64_t num_elements() const {
    int64_t count = ndim > 0 ? 1 : 0;
    bool beyond = false;
    for (int i = 0; i < ndim; ++i) {
      if (dims[i] == 0) return 0;
      if (__builtin_mul_overflow(count, dims[i], &count)) beyond = true;
    }
    return beyond ? INT64_MAX : count;
  }
};

}  // namespace polyhead
