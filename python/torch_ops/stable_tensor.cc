#include "stable_tensor.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "call_place.h"
#include "pages.h"

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

const DTypeNumber (&dtype_numbers())[11] {
  static const DTypeNumber numbers[] = {{DType::kFloat32, aoti_torch_dtype_float32()},
                                        {DType::kBFloat16, aoti_torch_dtype_bfloat16()},
                                        {DType::kFloat16, aoti_torch_dtype_float16()},
                                        {DType::kFloat64, aoti_torch_dtype_float64()},
                                        {DType::kBool, aoti_torch_dtype_bool()},
                                        {DType::kInt32, aoti_torch_dtype_int32()},
                                        {DType::kInt64, aoti_torch_dtype_int64()},
                                        {DType::kInt8, aoti_torch_dtype_int8()},
                                        {DType::kInt4x2, aoti_torch_dtype_uint8()},
                                        {DType::kFloat8E4M3, aoti_torch_dtype_float8_e4m3fn()},
                                        {DType::kFloat8E5M2, aoti_torch_dtype_float8_e5m2()}};
  return numbers;
}

DType dtype_of(int32_t number, const TensorArgument& argument) {
  for (const DTypeNumber& each : dtype_numbers()) {
    if (each.number == number && (argument.stored || !python::has_scales(each.dtype))) return each.dtype;
  }
  bad_value("%s has a dtype that polyhead does not have, must be float32, bfloat16, float16 or float64", argument.name);
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

namespace {

Device device_of(AtenTensorHandle handle, const TensorArgument& argument) {
  const CallPlace* const place = argument.on_cpu ? nullptr : CallPlace::current();
  int32_t type = 0, index = 0;
  if (aoti_torch_get_device_type(handle, &type) != 0) failure("%s has no device", argument.name);
  if (place == nullptr || place->device() == Device::kCpu) {
    if (type != aoti_torch_device_type_cpu()) bad_value("%s is not on the CPU, must be", argument.name);
    return Device::kCpu;
  }
  const bool there = type == place->torch_type() && aoti_torch_get_device_index(handle, &index) == 0;
  if (!there || index != place->index())
    bad_value("%s is not on cuda:%d, must be as query", argument.name, static_cast<int>(place->index()));
  return place->device();
}

}  // namespace

Tensor view_of(const StableTensor& tensor, const TensorArgument& argument) {
  const AtenTensorHandle handle = tensor.get();
  bool is_defined = false;
  if (aoti_torch_is_defined(handle, &is_defined) != 0 || !is_defined) {
    bad_value("%s is None, must be a tensor %s", argument.name, argument.shape);
  }
  int32_t dtype = 0;
  int64_t dim = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  void* data = nullptr;
  if (aoti_torch_get_dtype(handle, &dtype) != 0 || aoti_torch_get_dim(handle, &dim) != 0) {
    failure("%s has no dtype or dimensions", argument.name);
  }
  const Device device = device_of(handle, argument);
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
  view.device = device;
  view.dtype = dtype_of(dtype, argument);
  view.ndim = static_cast<int32_t>(dim);
  for (int i = 0; i < view.ndim; ++i) {
    view.dims[i] = sizes[i];
    view.strides[i] = strides[i];
  }
  return view;
}

namespace {

// Strides that leave no gaps, of dimensions in the order `innermost_first`.
void set_dense_strides(Tensor& view, const std::array<int, Tensor::kMaxDims>& innermost_first) {
  int64_t stride = 1;
  for (int i = 0; i < view.ndim; ++i) {
    view.strides[innermost_first[i]] = stride;
    stride *= std::max<int64_t>(view.dims[innermost_first[i]], 1);
  }
}

std::array<int, Tensor::kMaxDims> last_first(int ndim) {
  std::array<int, Tensor::kMaxDims> order = {};
  for (int i = 0; i < ndim; ++i) order[i] = ndim - 1 - i;
  return order;
}

// Whether of two dimensions `inner`, which stands nearer to the elements, belongs further out than `outer`: +1, if not
// -1, and 0 where an expanded dimension or equal strides tell nothing.
int compared(const Tensor& like, int inner, int outer) {
  const int64_t inner_stride = like.strides[inner], outer_stride = like.strides[outer];
  if (inner_stride == 0 || outer_stride == 0) return 0;
  if (inner_stride != outer_stride) return inner_stride < outer_stride ? -1 : 1;
  return like.dims[inner] > like.dims[outer] ? 1 : 0;
}

// In the order of `like`'s memory, as torch's TensorIterator finds it.
std::array<int, Tensor::kMaxDims> memory_order(const Tensor& like) {
  auto order = last_first(like.ndim);
  for (int i = 1; i < like.ndim; ++i) {
    for (int at = i, j = i - 1; j >= 0; --j) {
      const int comparison = compared(like, order[j], order[at]);
      if (comparison < 0) break;
      if (comparison == 0) continue;
      std::swap(order[j], order[at]);
      at = j;
    }
  }
  return order;
}

// Without gaps and overlaps; what has one element in a dimension is nowhere along it.
bool is_dense(const Tensor& tensor) {
  const auto is_wide = [&](int d) { return tensor.dims[d] > 1; };
  int left = 0;
  for (int d = 0; d < tensor.ndim; ++d) left += is_wide(d) ? 1 : 0;
  int64_t stride = 1;
  for (bool found = true; found && left > 0;) {
    found = false;
    for (int d = 0; d < tensor.ndim; ++d) {
      if (!is_wide(d) || tensor.strides[d] != stride) continue;
      found = true;
      stride *= tensor.dims[d];
      --left;
    }
  }
  return left == 0;
}

// Refuses what has too many elements to count: `view` has no strides yet.
void check_size(const Tensor& view, const char* name) {
  int64_t elements = 1;
  for (int i = 0; i < view.ndim; ++i) {
    if (__builtin_mul_overflow(elements, std::max<int64_t>(view.dims[i], 1), &elements)) {
      out_of_memory(std::string("no memory for a result of more than 2^62 elements: ") + name);
    }
  }
}

// A new tensor of the dims and strides of `seen`, where the call computes; `seen` becomes its view.
StableTensor new_strided(Tensor& seen, const char* name) {
  const CallPlace* const place = CallPlace::current();
  const int32_t type = place == nullptr ? aoti_torch_device_type_cpu() : place->torch_type();
  const int32_t index = place == nullptr ? 0 : place->index();
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(seen.ndim, seen.dims, seen.strides, number_of(seen.dtype), type, index, &handle) != 0) {
    out_of_memory(std::string("no memory for ") + name + " of " + std::to_string(seen.num_elements()) + " elements");
  }
  StableTensor tensor(handle);
  if (aoti_torch_get_data_ptr(handle, &seen.data) != 0) failure("%s has no memory", name);
  if (place != nullptr) seen.device = place->device();
  return tensor;
}

}  // namespace

StableTensor new_tensor(Tensor& view, const char* name, bool heads_first) {
  check_size(view, name);
  set_dense_strides(view, last_first(view.ndim));
  Tensor seen = heads_first ? heads_and_rows_swapped(view) : view;
  StableTensor tensor = new_strided(seen, name);
  view.data = seen.data;
  view.device = seen.device;
  return tensor;
}

StableTensor new_tensor_like(Tensor& view, const Tensor& like, const char* name) {
  check_size(view, name);
  if (is_dense(like) || like.num_elements() == 0) {
    std::copy_n(like.strides, like.ndim, view.strides);
  } else {
    set_dense_strides(view, memory_order(like));
  }
  return new_strided(view, name);
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

namespace {

std::string text_of(StableIValue value) {
  const auto string = reinterpret_cast<StringHandle>(value);
  size_t length = 0;
  const char* data = nullptr;
  const bool readable = torch_string_length(string, &length) == 0 && torch_string_c_str(string, &data) == 0;
  std::string text(readable ? data : "", readable ? length : 0);
  torch_delete_string(string);
  return text;
}

}  // namespace

double ArgumentReader::real() { return std::bit_cast<double>(*next_++); }

std::optional<int64_t> ArgumentReader::optional_integer() {
  const auto value = optional();
  return value ? std::optional(static_cast<int64_t>(*value)) : std::nullopt;
}

std::optional<double> ArgumentReader::optional_real() {
  const auto value = optional();
  return value ? std::optional(std::bit_cast<double>(*value)) : std::nullopt;
}

std::string ArgumentReader::text() { return text_of(*next_++); }

std::optional<std::string> ArgumentReader::optional_text() {
  const auto value = optional();
  return value ? std::optional(text_of(*value)) : std::nullopt;
}

}  // namespace polyhead::torch_ops
