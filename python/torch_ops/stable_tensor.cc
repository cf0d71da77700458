#include "stable_tensor.h"

#include <array>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace polyhead::torch_ops {
namespace {

std::string printed(const char* format, va_list arguments) {
  char text[512];
  std::vsnprintf(text, sizeof text, format, arguments);
  return text;
}

class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(const std::string& message) : message_(message) {}
  const char* what() const noexcept override { return message_.what(); }

 private:
  std::runtime_error message_;  // its copies do not throw
};

// torch's number of each of our dtypes.
struct DTypeNumber {
  DType dtype;
  int32_t number;
};

const DTypeNumber (&dtype_numbers())[7] {
  static const DTypeNumber numbers[] = {
      {DType::kFloat32, aoti_torch_dtype_float32()}, {DType::kBFloat16, aoti_torch_dtype_bfloat16()},
      {DType::kFloat16, aoti_torch_dtype_float16()}, {DType::kFloat64, aoti_torch_dtype_float64()},
      {DType::kBool, aoti_torch_dtype_bool()},       {DType::kInt32, aoti_torch_dtype_int32()},
      {DType::kInt64, aoti_torch_dtype_int64()}};
  return numbers;
}

DType dtype_of(int32_t number, const char* name) {
  for (const DTypeNumber& each : dtype_numbers()) {
    if (each.number == number) return each.dtype;
  }
  bad_value("%s has a dtype that polyhead does not have, must be float32, bfloat16, float16 or float64", name);
}

int32_t number_of(DType dtype) {
  for (const DTypeNumber& each : dtype_numbers()) {
    if (each.dtype == dtype) return each.number;
  }
  return -1;
}

}  // namespace

void bad_value(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const std::string message = printed(format, arguments);
  va_end(arguments);
  throw std::invalid_argument(message);
}

void failure(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const std::string message = printed(format, arguments);
  va_end(arguments);
  throw std::runtime_error(message);
}

void out_of_memory(const std::string& message) { throw OutOfMemory(message); }

void check(const Status& status) {
  if (status.ok()) return;
  if (status.code() == StatusCode::kOutOfMemory) out_of_memory(status.message());
  if (status.code() == StatusCode::kInternal) failure("%s", status.message().c_str());
  bad_value("%s", status.message().c_str());
}

void check_counts(const char* name, uint64_t num_inputs, uint64_t takes) {
  if (num_inputs == takes) return;
  failure("polyhead::%s has %d arguments, this libpolyhead_torch.so takes %d: they are of different versions", name,
          static_cast<int>(num_inputs), static_cast<int>(takes));
}

Tensor view_of(const StableTensor& tensor, const TensorArgument& argument) {
  const AtenTensorHandle handle = tensor.get();
  bool is_defined = false;
  if (aoti_torch_is_defined(handle, &is_defined) != 0 || !is_defined) {
    bad_value("%s is None, must be a tensor %s", argument.name, argument.shape);
  }
  int32_t dtype = 0, device_type = 0;
  int64_t dim = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  void* data = nullptr;
  if (aoti_torch_get_device_type(handle, &device_type) != 0 || aoti_torch_get_dtype(handle, &dtype) != 0 ||
      aoti_torch_get_dim(handle, &dim) != 0) {
    failure("%s has no device, dtype or dimensions", argument.name);
  }
  if (device_type != aoti_torch_device_type_cpu()) bad_value("%s is not on the CPU, must be", argument.name);
  if (dim < argument.min_dims || dim > argument.max_dims) {
    if (argument.min_dims == argument.max_dims) {
      bad_value("%s has %d dimensions, must have %d: %s", argument.name, static_cast<int>(dim), argument.min_dims,
                argument.shape);
    }
    bad_value("%s has %d dimensions, must have %d to %d: %s", argument.name, static_cast<int>(dim), argument.min_dims,
              argument.max_dims, argument.shape);
  }
  if (aoti_torch_get_sizes(handle, &sizes) != 0 || aoti_torch_get_strides(handle, &strides) != 0 ||
      aoti_torch_get_data_ptr(handle, &data) != 0) {
    bad_value("%s has no memory with strides, must be a dense tensor", argument.name);
  }
  Tensor view;
  view.data = data;
  view.dtype = dtype_of(dtype, argument.name);
  view.ndim = static_cast<int32_t>(dim);
  for (int i = 0; i < view.ndim; ++i) {
    view.dims[i] = sizes[i];
    view.strides[i] = strides[i];
  }
  return view;
}

namespace {

// `order`: the dimensions, outermost first.
StableTensor new_ordered(Tensor& view, const std::array<int, Tensor::kMaxDims>& order, const char* name,
                         bool heads_first) {
  int64_t stride = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    const int dim = order[static_cast<size_t>(i)];
    view.strides[dim] = stride;
    if (__builtin_mul_overflow(stride, view.dims[dim] > 0 ? view.dims[dim] : 1, &stride)) {
      out_of_memory(std::string("no memory for a result of more than 2^62 elements: ") + name);
    }
  }
  const Tensor seen = heads_first ? heads_and_rows_swapped(view) : view;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(seen.ndim, seen.dims, seen.strides, number_of(seen.dtype), aoti_torch_device_type_cpu(),
                               0, &handle) != 0) {
    out_of_memory(std::string("no memory for ") + name + " of " + std::to_string(stride) + " elements");
  }
  StableTensor tensor(handle);
  if (aoti_torch_get_data_ptr(handle, &view.data) != 0) failure("%s has no memory", name);
  return tensor;
}

std::array<int, Tensor::kMaxDims> from_outermost() {
  std::array<int, Tensor::kMaxDims> order;
  std::iota(order.begin(), order.end(), 0);
  return order;
}

}  // namespace

StableTensor new_tensor(Tensor& view, const char* name, bool heads_first) {
  return new_ordered(view, from_outermost(), name, heads_first);
}

StableTensor new_tensor_like(Tensor& view, const Tensor& like, const char* name, bool heads_first) {
  auto order = from_outermost();
  for (size_t i = 1; i < 4; ++i) {  // insertion: dimensions of one stride keep their order
    for (size_t j = i; j > 0 && like.strides[order[j - 1]] < like.strides[order[j]]; --j) {
      std::swap(order[j - 1], order[j]);
    }
  }
  return new_ordered(view, order, name, heads_first);
}

Tensor heads_and_rows_swapped(Tensor view) {
  std::swap(view.dims[1], view.dims[2]);
  std::swap(view.strides[1], view.strides[2]);
  return view;
}

StableIValue result(StableTensor&& tensor) {
  AtenTensorHandle handle = tensor.release();
  if (handle == nullptr && aoti_torch_new_uninitialized_tensor(&handle) != 0) out_of_memory("no memory for a result");
  return reinterpret_cast<StableIValue>(handle);
}

StableIValue optional_result(StableTensor&& tensor) {
  if (!tensor.given()) return 0;
  StableIValue* value = nullptr;
  if (torch_new_stable_ivalue == nullptr) {
    value = new StableIValue;
  } else if (torch_new_stable_ivalue(&value) != 0) {
    out_of_memory("no memory for a result");
  }
  *value = reinterpret_cast<StableIValue>(tensor.release());
  return reinterpret_cast<StableIValue>(value);
}

StableIValue list_result(std::vector<StableTensor>&& tensors) {
  StableListHandle list = nullptr;
  if (torch_new_list_reserve_size(tensors.size(), &list) != 0) out_of_memory("no memory for a list of results");
  for (StableTensor& tensor : tensors) torch_list_push_back(list, result(std::move(tensor)));  // has been reserved
  return reinterpret_cast<StableIValue>(list);
}

std::optional<StableIValue> ArgumentReader::optional() {
  auto* const value = reinterpret_cast<StableIValue*>(*next_++);
  if (value == nullptr) return {};
  const StableIValue result = *value;
  if (torch_delete_stable_ivalue != nullptr) {
    torch_delete_stable_ivalue(value);
  } else {
    delete value;
  }
  return result;
}

StableTensor ArgumentReader::optional_tensor() {
  const auto value = optional();
  return value ? StableTensor(reinterpret_cast<AtenTensorHandle>(*value)) : StableTensor();
}

std::vector<StableTensor> ArgumentReader::tensors() {
  const auto list = reinterpret_cast<StableListHandle>(*next_++);
  size_t size = 0;
  torch_list_size(list, &size);
  std::vector<StableTensor> result;
  result.reserve(size);
  for (size_t i = 0; i < size; ++i) {
    StableIValue element = 0;
    if (torch_list_get_item(list, i, &element) == 0) {
      result.emplace_back(reinterpret_cast<AtenTensorHandle>(element));
    }
  }
  torch_delete_list(list);
  return result;
}

double ArgumentReader::real() { return std::bit_cast<double>(*next_++); }

std::optional<int64_t> ArgumentReader::optional_integer() {
  const auto value = optional();
  return value ? std::optional(static_cast<int64_t>(*value)) : std::nullopt;
}

std::optional<double> ArgumentReader::optional_real() {
  const auto value = optional();
  return value ? std::optional(std::bit_cast<double>(*value)) : std::nullopt;
}

}  // namespace polyhead::torch_ops
