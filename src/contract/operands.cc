#include "contract/operands.h"

#include "core/sentence.h"

namespace polyhead {
namespace {

bool takes(const OperandShape& shape, DType dtype) {
  using Takes = OperandShape::Takes;
  if (shape.takes == Takes::kInt32OrInt64) return dtype == DType::kInt32 || dtype == DType::kInt64;
  return dtype == shape.dtype || (shape.takes == Takes::kDtypeOrFloat32 && dtype == DType::kFloat32);
}

Status wrong_dtype(const char* name, DType dtype, const OperandShape& shape) {
  const bool integers = shape.takes == OperandShape::Takes::kInt32OrInt64;
  return invalid(
      sentence(name, " is ", dtype_name(dtype), ", expected ", integers ? "int32 or int64" : dtype_name(shape.dtype)));
}

Status wrong_device(const char* name, Device expected) {
  return invalid(sentence(name, " is not on ", expected == Device::kCpu ? "the CPU" : device_name(expected),
                          ", where this call computes"));
}

Status wrong_ndim(const char* name, int32_t ndim, const OperandShape& shape) {
  std::string layout;
  for (int i = 0; i < shape.ndim; ++i) layout += sentence(i == 0 ? "" : ", ", shape.dims[i].name);
  return invalid(sentence(name, " has ", ndim, " dims, expected ", shape.ndim, ": [", layout, "]"));
}

Status wrong_dim(const char* name, int i, int64_t size, const OperandShape& shape) {
  const Dim& dim = shape.dims[i];
  if (shape.planned) {
    return invalid(sentence(name, " dim ", i, " (", dim.name, ") is ", size, ", the plan's is ", dim.size));
  }
  return invalid(sentence(name, " dim ", i, " is ", size, ", expected ", dim.name, " ", dim.size));
}

// Pointer and strides of a view whose dims are as expected.
Status check_memory(const char* name, const Tensor& t, MemoryRange* range) {
  const bool fits = memory_range(t, range);
  if (t.data == nullptr && t.num_elements() > 0) {
    return invalid(sentence(name, " is null, has ", t.num_elements(), " elements"));
  }
  if (!fits) return invalid(sentence(name, " reaches beyond the address space, by its strides"));
  if (range->begin == range->end) return {};
  const size_t element_bytes = dtype_size_bytes(t.dtype);
  if (reinterpret_cast<uintptr_t>(t.data) % element_bytes != 0) {
    return invalid(sentence(name, " is not aligned to its elements of ", element_bytes, " bytes"));
  }
  return {};
}

}  // namespace

Status check_writable(Role role, const char* name, const Tensor& t) {
  for (int i = 0; i < t.ndim && role == Role::kOutput; ++i) {
    if (t.dims[i] > 1 && t.strides[i] < 0) {
      return invalid(sentence(name, " has stride ", t.strides[i], " in dim ", i, ", an output's must not be negative"));
    }
  }
  if (!overlaps_itself(t)) return {};
  return invalid(sentence(name, " overlaps itself: two indices name one element"));
}

Status check_tensor(const char* name, const Tensor& t, const OperandShape& shape, Device device, MemoryRange* range) {
  if (!t.given()) return invalid(sentence(name, " is missing"));
  if (!takes(shape, t.dtype)) return wrong_dtype(name, t.dtype, shape);
  if (t.device != device) return wrong_device(name, device);
  if (t.ndim != shape.ndim) return wrong_ndim(name, t.ndim, shape);
  for (int i = 0; i < t.ndim; ++i) {
    if (t.dims[i] != shape.dims[i].size) return wrong_dim(name, i, t.dims[i], shape);
    if (t.dims[i] < 0) return invalid(sentence(name, " dim ", i, " is ", t.dims[i], ", must not be negative"));
  }
  return check_memory(name, t, range);
}

Status Operands::add(Role role, const char* name, const Tensor& t, const OperandShape& shape) {
  if (count_ == kMost) return {StatusCode::kInternal, sentence("a call has more than ", kMost, " tensors")};
  Operand& added = operands_[count_];
  added.name = name;
  added.tensor = &t;
  if (Status status = check_tensor(name, t, shape, device_, &added.range); !status.ok()) return status;
  ++count_;
  if (role == Role::kInput || added.range.begin == added.range.end) return {};
  if (Status status = check_writable(role, name, t); !status.ok()) return status;
  for (int i = 0; i < count_ - 1; ++i) {
    const Operand& other = operands_[i];
    if (added.range.intersects(other.range) && may_share_memory(t, *other.tensor)) {
      return invalid(sentence(name, " overlaps ", other.name));
    }
  }
  return {};
}

Status Operands::add_memory(Role role, const char* name, const void* data, size_t given_bytes, size_t needed_bytes,
                            Tensor* view) {
  if (data == nullptr) return invalid(sentence(name, " is null, needs ", needed_bytes, " bytes"));
  if (given_bytes < needed_bytes) return invalid(sentence(name, "_bytes is ", given_bytes, ", needs ", needed_bytes));
  if (reinterpret_cast<uintptr_t>(data) % 64 != 0) return invalid(sentence(name, " is not aligned to 64 bytes"));
  const auto bytes = static_cast<int64_t>(needed_bytes);
  *view = Tensor(const_cast<void*>(data), DType::kBool, {bytes});
  view->device = device_;
  return add(role, name, *view, {DType::kBool, {{"bytes", bytes}}});
}

Status Operands::check_workspace(const void* data, size_t given_bytes, size_t needed_bytes) const {
  if (needed_bytes == 0) return {};
  if (data == nullptr) return invalid(sentence("workspace is null, needs ", needed_bytes, " bytes"));
  if (given_bytes < needed_bytes) {
    return invalid(sentence("workspace_bytes is ", given_bytes, ", needs ", needed_bytes));
  }
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (begin % 64 != 0) return invalid("workspace is not aligned to 64 bytes");
  const MemoryRange range{begin, begin + needed_bytes};
  if (range.end < begin) return invalid("workspace reaches beyond the address space");
  for (int i = 0; i < count_; ++i) {
    if (range.intersects(operands_[i].range)) return invalid(sentence("workspace overlaps ", operands_[i].name));
  }
  return {};
}

Status unasked(const char* name, const Tensor& t) {
  if (!t.given()) return {};
  return invalid(sentence(name, " is given, but the plan was made without"));
}

}  // namespace polyhead
