// The tensors of a call, checked one by one and against each other, whatever the call computes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/layout.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead {

struct Dim {
  const char* name;
  int64_t size;
};

enum class Role : uint8_t { kInput, kOutput, kGradient };

// What a tensor of a call must be. No dims: the call has no such tensor.
struct OperandShape {
  enum class Takes : uint8_t { kDtype, kDtypeOrFloat32, kInt32OrInt64 };

  DType dtype = DType::kFloat32;
  Takes takes = Takes::kDtype;
  bool planned = false;  // the caller chose the dims when the plan was made, and a sentence about them says so
  int32_t ndim = 0;
  Dim dims[Tensor::kMaxDims];  // `ndim` of them are set

  OperandShape() = default;
  template <int kDims>
  OperandShape(DType type, const Dim (&sizes)[kDims]) : dtype(type), ndim(kDims) {
    static_assert(kDims <= Tensor::kMaxDims);
    for (int i = 0; i < kDims; ++i) dims[i] = sizes[i];
  }
};

// One tensor by itself: given, dtype, device, dims, pointer and strides. Fills the range of bytes that it touches.
Status check_tensor(const char* name, const Tensor& t, const OperandShape& shape, Device device, MemoryRange* range);

// Whether the elements of what is written lie apart, and, but for gradients, in ascending order. Its memory has passed
// check_tensor.
Status check_writable(Role role, const char* name, const Tensor& t);

// The operands of one call, each checked as it is added; outputs, which come last, against all before them. Allocates
// nothing unless there is an error.
class Operands {
 public:
  explicit Operands(Device device = Device::kCpu) : device_(device) {}

  Status add(Role role, const char* name, const Tensor& t, const OperandShape& shape);

  // What a call finds or leaves in memory of its own layout, aligned to 64: an operand like others, of bytes. Fills `view`,
  // which outlives this.
  Status add_memory(Role role, const char* name, const void* data, size_t given_bytes, size_t needed_bytes,
                    Tensor* view);

  Status check_workspace(const void* data, size_t given_bytes, size_t needed_bytes) const;

  // see(name, data) of each that has elements, in the order in which they were added.
  template <class See>
  void for_each(const See& see) const {
    for (int i = 0; i < count_; ++i) {
      if (operands_[i].range.begin != operands_[i].range.end) see(operands_[i].name, operands_[i].tensor->data);
    }
  }

  static constexpr int kMost = 48;  // more than any call has: a layer's backward has 37

 private:
  struct Operand {
    const char* name;
    const Tensor* tensor;
    MemoryRange range;
  };

  Device device_;
  int count_ = 0;
  Operand operands_[kMost];
};

// Refuses a tensor that the desc does not ask for.
Status unasked(const char* name, const Tensor& t);

}  // namespace polyhead
