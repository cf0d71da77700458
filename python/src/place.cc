#include "place.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "polyhead/cuda.h"
#include "scalars.h"

namespace polyhead::python {
namespace {

constexpr int kCudaType = nb::device::cuda::value;

thread_local const Place* current_place = nullptr;

nb::object cuda_arrays(const char* function) { return nb::module_::import_("polyhead._cuda_arrays").attr(function); }

nb::object attribute(PyObject* object, const char* name) {
  nb::object found = nb::steal(PyObject_GetAttrString(object, name));
  if (!found.is_valid()) PyErr_Clear();
  return found;
}

// (device type, its number) as DLPack has them; of what does not tell: (0, 0).
std::pair<int, int> dlpack_device(PyObject* object) {
  const nb::object ask = attribute(object, "__dlpack_device__");
  if (!ask.is_valid()) return {0, 0};
  const nb::object told = nb::steal(PyObject_CallNoArgs(ask.ptr()));
  if (!told.is_valid()) throw nb::python_error();
  return nb::cast<std::pair<int, int>>(told);
}

// Of `query`; -1: the host's memory.
int cuda_device(PyObject* query) {
  const auto [type, device] = dlpack_device(query);
  if (type == kCudaType) return device;
  if (type != 0 || PyType_Check(query) || !has_cuda_interface(query)) return -1;
  const nb::object data = nb::handle(query).attr("__cuda_array_interface__")["data"];
  const auto address = nb::cast<uintptr_t>(nb::object(data[0]));
  return address == 0 ? 0 : checked(cuda_device_of(reinterpret_cast<void*>(address)));
}

// A build without CUDA kernels says so when a plan is made.
void check_unless_unsupported(const Status& status) {
  if (status.code() != StatusCode::kUnsupported) check(status);
}

// Of a DeviceArray.
DType dtype_named(const std::string& name) {
  for (const DType each : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt64,
                           DType::kInt32, DType::kBool}) {
    if (name == dtype_name(each)) return each;
  }
  return DType::kInt4x2;  // bytes
}

DType interface_dtype(const nb::object& typestr, const ArrayArgument& argument) {
  const std::pair<const char*, DType> known[] = {
      {"<f4", DType::kFloat32}, {"<f2", DType::kFloat16}, {"<f8", DType::kFloat64}, {"|b1", DType::kBool},
      {"<i4", DType::kInt32},   {"<i8", DType::kInt64},   {"|i1", DType::kInt8},    {"|u1", DType::kInt4x2}};
  const std::string name = nb::cast<std::string>(typestr);
  for (const auto& [text, dtype] : known) {
    const bool scaled = dtype == DType::kInt8 || dtype == DType::kInt4x2;
    if (name == text && (argument.stored || !scaled)) return dtype;
  }
  bad_value("%s has dtype %s, must be %s", argument.name, name.c_str(), argument.dtypes);
}

void set_strides(const nb::object& strides, const ArrayArgument& argument, Tensor& view) {
  const auto bytes = static_cast<int64_t>(dtype_size_bytes(view.dtype));
  int64_t stride = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.strides[i] = stride;
    stride *= view.dims[i] > 0 ? view.dims[i] : 1;
    if (strides.is_none()) continue;
    const auto told = nb::cast<int64_t>(nb::object(strides[i]));
    if (told % bytes != 0 && view.dims[i] > 1) {
      bad_value("%s has stride %lld in dimension %d, must be a multiple of its %d-byte elements", argument.name,
                static_cast<long long>(told), i, static_cast<int>(bytes));
    }
    view.strides[i] = told / bytes;
  }
}

nb::object shape_of(const Tensor& view) {
  nb::object shape = nb::steal(PyTuple_New(view.ndim));
  for (int i = 0; i < view.ndim; ++i) PyTuple_SET_ITEM(shape.ptr(), i, PyLong_FromLongLong(view.dims[i]));
  return shape;
}

}  // namespace

const Place* Place::current() { return current_place; }

Place::Place(PyObject* query, PyObject* stream) : before_(current_place) {
  if (!is_on_host(query)) device_ = cuda_device(query);
  if (on_cuda()) {
    query_ = nb::borrow(query);
    const nb::object own = cuda_arrays("current_stream")(query_, device_);
    void* const producer = reinterpret_cast<void*>(nb::cast<uintptr_t>(own));
    stream_ = stream == Py_None ? producer : handle_argument(stream, "stream");
    check(on_device_.emplace(device_).status());
    check_unless_unsupported(order_cuda_streams(producer, stream_));
  }
  current_place = this;
}

Place::~Place() { current_place = before_; }

nb::object Place::new_array(PyObject* like, const Tensor& shape, const char* dtype) const {
  return cuda_arrays("new_array")(nb::handle(like), shape_of(shape), dtype, device_,
                                  reinterpret_cast<uintptr_t>(stream_));
}

Where Place::where(Executor* executor) const {
  if (!on_cuda()) return {.device = Device::kCpu, .executor = executor, .stream = nullptr};
  return {.device = Device::kCuda, .executor = executor, .stream = stream_};
}

nb::object Place::new_workspace(size_t bytes, void** memory) const {
  if (bytes == 0) return nb::none();
  Tensor shape;
  shape.ndim = 1;
  shape.dims[0] = static_cast<int64_t>(bytes);
  nb::object array = new_array(query_.ptr(), shape, "uint8");
  Held held;
  *memory = view_of(array.ptr(), {"workspace", "uint8", 1, 1, "[bytes]", true}, held).data;
  return array;
}

bool is_device_array(PyObject* object) { return PyObject_IsInstance(object, cuda_arrays("DeviceArray").ptr()) == 1; }

bool has_cuda_interface(PyObject* object) { return attribute(object, "__cuda_array_interface__").is_valid(); }

Tensor view_of_cuda_interface(PyObject* object, const ArrayArgument& argument) {
  const nb::dict interface = nb::cast<nb::dict>(attribute(object, "__cuda_array_interface__"));
  const auto field = [&](const char* name) {
    return interface.contains(name) ? nb::object(interface[name]) : nb::object(nb::none());
  };
  if (!field("mask").is_none()) bad_value("%s has a mask, must be an array without one", argument.name);
  Tensor view;
  view.dtype = interface_dtype(field("typestr"), argument);
  view.device = Device::kCuda;
  const nb::object shape = field("shape");
  const auto num_dims = static_cast<int64_t>(nb::len(shape));
  check_num_dims(num_dims, argument);
  view.ndim = static_cast<int32_t>(num_dims);
  for (int i = 0; i < view.ndim; ++i) view.dims[i] = nb::cast<int64_t>(nb::object(shape[i]));
  view.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(nb::object(field("data")[0])));
  set_strides(field("strides"), argument, view);
  const Place* const place = Place::current();
  if (view.num_elements() > 0) check_place(argument, kCudaType, checked(cuda_device_of(view.data)));
  if (const nb::object producer = field("stream"); place != nullptr && !producer.is_none()) {
    check(order_cuda_streams(reinterpret_cast<void*>(nb::cast<uintptr_t>(producer)), place->stream()));
  }
  return view;
}

nb::object dlpack_of(PyObject* object) {
  const Place* const place = Place::current();
  if (place == nullptr || !place->on_cuda() || dlpack_device(object).first != kCudaType) return nb::borrow(object);
  const auto stream = reinterpret_cast<uintptr_t>(place->stream());
  constexpr uintptr_t kDefaultStream = 1;  // as DLPack counts
  return nb::handle(object).attr("__dlpack__")(nb::arg("stream") = stream == 0 ? kDefaultStream : stream);
}

void check_place(const ArrayArgument& argument, int device_type, int device) {
  constexpr int kCpuType = nb::device::cpu::value;
  const Place* const place = Place::current();
  const int wanted = place != nullptr ? place->device() : -1;
  if (device_type == (wanted >= 0 ? kCudaType : kCpuType) && (wanted < 0 || device == wanted)) return;
  const auto text = [](int type, int number) {
    if (type == kCpuType) return std::string("in CPU memory");
    return (type == kCudaType ? "on CUDA device " : "on DLPack device " + std::to_string(type) + ":") +
           std::to_string(number);
  };
  const std::string is = text(device_type, device), must_be = text(wanted >= 0 ? kCudaType : kCpuType, wanted);
  bad_value("%s is %s, must be %s%s", argument.name, is.c_str(), must_be.c_str(), wanted >= 0 ? " as query" : "");
}

namespace {

void* pointer_of(uintptr_t address) { return reinterpret_cast<void*>(address); }

nb::dict describe_cuda() {
  const CudaMachine machine = cuda_machine();
  nb::list devices;
  for (const CudaDevice& each : machine.devices) {
    devices.append(
        nb::make_tuple(each.name, each.capability_major, each.capability_minor, each.memory_bytes, each.why_not));
  }
  nb::dict told;
  told["why_not"] = machine.why_not;
  told["driver_version"] = machine.driver_version;
  told["runtime_version"] = machine.runtime_version;
  told["devices"] = devices;
  return told;
}

}  // namespace

void add_cuda(nb::module_& module) {
  module.def("cuda_machine", &describe_cuda);
  module.def("cuda_device", [](nb::object array) { return is_on_host(array.ptr()) ? -1 : cuda_device(array.ptr()); });
  module.def("cuda_allocate", [](size_t bytes, int device, uintptr_t stream) {
    const OnDevice there(device);
    check(there.status());
    return reinterpret_cast<uintptr_t>(checked(allocate_cuda(bytes, pointer_of(stream))));
  });
  module.def("cuda_free", [](uintptr_t memory, int device, uintptr_t stream) {
    const OnDevice there(device);
    check(there.status());
    check(free_cuda(pointer_of(memory), pointer_of(stream)));
  });
  module.def("cuda_order", [](uintptr_t before, int device, uintptr_t stream) {
    const OnDevice there(device);
    check(there.status());
    check(order_cuda_streams(pointer_of(before), pointer_of(stream)));
  });
  module.def("cuda_capsule", [](nb::object owner, uintptr_t memory, nb::tuple shape, nb::tuple strides,
                                const std::string& dtype, int device) {
    Tensor view;
    view.data = pointer_of(memory);
    view.dtype = dtype_named(dtype);
    view.ndim = static_cast<int32_t>(shape.size());
    for (int i = 0; i < view.ndim; ++i) {
      view.dims[i] = nb::cast<int64_t>(shape[i]);
      view.strides[i] = nb::cast<int64_t>(strides[i]);
    }
    return cuda_capsule(std::move(owner), view, device);
  });
}

}  // namespace polyhead::python
