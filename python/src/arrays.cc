#include "arrays.h"

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "pages.h"
#include "place.h"

namespace polyhead::python {
namespace {

constexpr size_t kAlignment = 64;  // of results: a cache line, and what jax needs to take one without a copy

PyObject* error_type = nullptr;  // polyhead.Error, for the life of the process

constexpr const char* kErrorDoc =
    "Bad input, or a call that no kernel can compute. The message is one sentence of the library: the argument, what\n"
    "was expected and what came.";

void set_error(PyObject* type, const char* format, va_list args) {
  PyObject* message = PyUnicode_FromFormatV(format, args);
  if (message == nullptr) return;
  PyErr_SetObject(type, message);
  Py_DECREF(message);
}

// ml_dtypes registers its own types with NumPy; there are no numbers for them.
std::optional<DType> ml_dtype_of(const PyArray_Descr* descr) {
  if (!PyTypeNum_ISUSERDEF(descr->type_num)) return std::nullopt;
  const std::string_view name = descr->typeobj->tp_name, last = name.substr(name.rfind('.') + 1);
  if (last == "bfloat16") return DType::kBFloat16;
  if (last == "float8_e4m3fn") return DType::kFloat8E4M3;
  if (last == "float8_e5m2") return DType::kFloat8E5M2;
  return std::nullopt;
}

std::optional<DType> dtype_of(const PyArray_Descr* descr) {
  switch (descr->type_num) {
    case NPY_FLOAT: return DType::kFloat32;
    case NPY_DOUBLE: return DType::kFloat64;
    case NPY_HALF: return DType::kFloat16;
    case NPY_BOOL: return DType::kBool;
    case NPY_INT: return DType::kInt32;
    case NPY_LONG: return sizeof(long) == 8 ? DType::kInt64 : DType::kInt32;
    case NPY_LONGLONG: return DType::kInt64;
    case NPY_BYTE: return DType::kInt8;
    case NPY_UBYTE: return DType::kInt4x2;
    default: return ml_dtype_of(descr);
  }
}

constexpr uint8_t kDlpackE4M3 = 10, kDlpackE5M2 = 12;  // of DLPack 1.1: float8_e4m3fn, float8_e5m2

std::optional<DType> dtype_of(nb::dlpack::dtype type) {
  using Code = nb::dlpack::dtype_code;
  if (type.lanes != 1) return std::nullopt;
  const auto is = [&](Code code, int bits) { return type.code == static_cast<uint8_t>(code) && type.bits == bits; };
  if (is(Code::Float, 32)) return DType::kFloat32;
  if (is(Code::Float, 64)) return DType::kFloat64;
  if (is(Code::Float, 16)) return DType::kFloat16;
  if (is(Code::Bfloat, 16)) return DType::kBFloat16;
  if (is(Code::Bool, 8)) return DType::kBool;
  if (is(Code::Int, 32)) return DType::kInt32;
  if (is(Code::Int, 64)) return DType::kInt64;
  if (is(Code::Int, 8)) return DType::kInt8;
  if (is(Code::UInt, 8)) return DType::kInt4x2;
  if (type.code == kDlpackE4M3 && type.bits == 8) return DType::kFloat8E4M3;
  if (type.code == kDlpackE5M2 && type.bits == 8) return DType::kFloat8E5M2;
  return std::nullopt;
}

std::optional<nb::dlpack::dtype> dlpack_dtype(DType dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto type = [](Code code, int bits) {
    return nb::dlpack::dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  };
  switch (dtype) {
    case DType::kFloat32: return type(Code::Float, 32);
    case DType::kFloat64: return type(Code::Float, 64);
    case DType::kFloat16: return type(Code::Float, 16);
    case DType::kBFloat16: return type(Code::Bfloat, 16);
    case DType::kBool: return type(Code::Bool, 8);
    case DType::kInt32: return type(Code::Int, 32);
    case DType::kInt64: return type(Code::Int, 64);
    case DType::kInt4x2: return type(Code::UInt, 8);  // bytes of a workspace
    case DType::kInt8:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: break;  // no result has it
  }
  return std::nullopt;
}

Tensor view_of_numpy(PyArrayObject* array, const ArrayArgument& argument) {
  Tensor view;
  PyArray_Descr* descr = PyArray_DESCR(array);
  check_place(argument, nb::device::cpu::value, 0);
  const auto dtype = dtype_of(descr);
  if (!dtype || (has_scales(*dtype) && !argument.stored)) {
    bad_value("%s has dtype %s, must be %s", argument.name, text_of(reinterpret_cast<PyObject*>(descr)).c_str(),
              argument.dtypes);
  }
  if (PyArray_ISBYTESWAPPED(array)) {
    bad_value("%s has dtype %s, must be in this machine's byte order: %s.astype(%s.dtype.newbyteorder('='))",
              argument.name, text_of(reinterpret_cast<PyObject*>(descr)).c_str(), argument.name, argument.name);
  }
  check_num_dims(PyArray_NDIM(array), argument);
  view.dtype = *dtype;
  view.data = PyArray_DATA(array);
  view.ndim = PyArray_NDIM(array);
  const auto itemsize = static_cast<int64_t>(dtype_size_bytes(*dtype));
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(itemsize) != 0) {
    bad_value("%s starts at an address that is not a multiple of its %d-byte elements, copy it first", argument.name,
              static_cast<int>(itemsize));
  }
  for (int i = 0; i < view.ndim; ++i) {
    view.dims[i] = PyArray_DIM(array, i);
    const int64_t stride_bytes = PyArray_STRIDE(array, i);
    if (stride_bytes % itemsize != 0 && view.dims[i] > 1) {
      bad_value("%s has stride %lld in dimension %d, must be a multiple of its %d-byte elements", argument.name,
                static_cast<long long>(stride_bytes), i, static_cast<int>(itemsize));
    }
    view.strides[i] = stride_bytes / itemsize;
  }
  return view;
}

// torch's own functions: a fifth of the time of __dlpack__, and they take tensors that require a gradient. DLPack
// cannot say that a view (as x.conj().imag is) stands for the negative of its memory: resolve_neg copies such a one.
struct Torch {
  PyTypeObject* tensor = nullptr;
  PyObject* resolve_neg = nullptr;
  PyObject* to_dlpack = nullptr;
  PyObject* from_dlpack = nullptr;
};

// Empty until torch has been imported, by whoever made the tensor; then for the life of the process.
const Torch& torch() {
  static Torch found;
  if (found.tensor != nullptr) return found;
  nb::dict modules = nb::module_::import_("sys").attr("modules");
  if (!modules.contains("torch") || !modules.contains("torch.utils.dlpack")) return found;
  const nb::object module = modules["torch.utils.dlpack"];
  if (!nb::hasattr(modules["torch"], "Tensor") || !nb::hasattr(module, "from_dlpack")) return found;
  found.resolve_neg = nb::object(modules["torch"].attr("resolve_neg")).release().ptr();
  found.to_dlpack = nb::object(module.attr("to_dlpack")).release().ptr();
  found.from_dlpack = nb::object(module.attr("from_dlpack")).release().ptr();
  found.tensor = reinterpret_cast<PyTypeObject*>(nb::object(modules["torch"].attr("Tensor")).release().ptr());
  return found;
}

bool is_torch_tensor(PyObject* object) {
  const Torch& t = torch();
  return t.tensor != nullptr && PyObject_TypeCheck(object, t.tensor);
}

// Raises what `object` itself says when asked for its memory; the current Python error, or __dlpack__'s.
[[noreturn]] void refuse_dlpack(PyObject* object, const ArrayArgument& argument) {
  if (PyErr_Occurred() == nullptr) nb::steal(PyObject_CallMethod(object, "__dlpack__", nullptr));
  if (PyErr_Occurred() == nullptr) {
    bad_value("%s has type %s, whose memory cannot be read through DLPack", argument.name, type_name(object));
  }
  nb::python_error cause;
  bad_value("%s has type %s and gives no DLPack view: %s", argument.name, type_name(object),
            text_of(cause.value().ptr()).c_str());
}

Tensor view_of_dlpack(PyObject* object, const ArrayArgument& argument, Held& held) {
  nb::object source = nb::borrow(object);
  if (is_torch_tensor(object)) {
    source = nb::steal(PyObject_CallOneArg(torch().resolve_neg, object));
    if (source.is_valid()) source = nb::steal(PyObject_CallOneArg(torch().to_dlpack, source.ptr()));
    if (!source.is_valid()) refuse_dlpack(object, argument);
  } else {
    source = dlpack_of(object);
  }
  if (!nb::try_cast(source, held, false)) refuse_dlpack(object, argument);
  check_place(argument, held.device_type(), held.device_id());
  const auto dtype = dtype_of(held.dtype());
  if (!dtype || (has_scales(*dtype) && !argument.stored)) {
    nb::object name = nb::getattr(nb::handle(object), "dtype", nb::none());
    bad_value("%s has dtype %s, must be %s", argument.name, text_of(name.ptr()).c_str(), argument.dtypes);
  }
  check_num_dims(static_cast<int64_t>(held.ndim()), argument);
  Tensor view;
  view.data = static_cast<char*>(held.data_handle()) + held.byte_offset();
  view.dtype = *dtype;
  view.device = held.device_type() == nb::device::cpu::value ? Device::kCpu : Device::kCuda;
  view.ndim = static_cast<int32_t>(held.ndim());
  for (int i = 0; i < view.ndim; ++i) {
    view.dims[i] = held.shape_ptr()[i];
    view.strides[i] = held.stride_ptr()[i];
  }
  return view;
}

// The function that turns an object with __dlpack__ into an array of the kind of `like`: from_dlpack of its array
// namespace (jax and other libraries of the array API) or of the package that defines its type or a base of that.
nb::object find_from_dlpack(const char* name, PyObject* like) {
  nb::handle object(like);
  if (nb::hasattr(object, "__array_namespace__")) {
    return object.attr("__array_namespace__")().attr("from_dlpack");
  }
  nb::dict modules = nb::module_::import_("sys").attr("modules");
  for (nb::handle type : object.type().attr("__mro__")) {
    const std::string module = nb::cast<nb::str>(type.attr("__module__")).c_str();
    const nb::str package(module.substr(0, module.find('.')).c_str());
    if (modules.contains(package) && nb::hasattr(modules[package], "from_dlpack")) {
      return modules[package].attr("from_dlpack");
    }
  }
  bad_kind("%s has type %s, for which no from_dlpack function is known: pass numpy.from_dlpack(%s)", name,
           type_name(like), name);
}

// The same, remembered by type: one look-up costs as much as a small call.
nb::object from_dlpack_of(const char* name, PyObject* like) {
  static PyObject* known = PyDict_New();
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(like));
  if (PyObject* found = PyDict_GetItemWithError(known, type)) return nb::borrow(found);
  nb::object function = find_from_dlpack(name, like);
  if (PyDict_SetItem(known, type, function.ptr()) != 0) throw nb::python_error();
  return function;
}

[[noreturn]] void no_memory(const char* bytes) {
  PyErr_Format(PyExc_MemoryError, "no memory for a result of %s bytes", bytes);
  throw nb::python_error();
}

constexpr const char* kBufferName = "polyhead.buffer";

// Memory for `view`, which becomes contiguous; the capsule frees it.
nb::object allocate(Tensor& view) {
  int64_t bytes = static_cast<int64_t>(dtype_size_bytes(view.dtype));
  bool fits = true, empty = false;
  int64_t stride = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.strides[i] = stride;
    empty = empty || view.dims[i] == 0;
    const int64_t size = view.dims[i] > 0 ? view.dims[i] : 1;
    fits = fits && !__builtin_mul_overflow(bytes, size, &bytes) && !__builtin_mul_overflow(stride, size, &stride);
  }
  // A multiple of the alignment, as aligned_alloc demands; half of the address space is no array.
  if (empty && fits) bytes = 1;  // whatever its other dims are
  if (!fits || bytes > INT64_MAX / 2) no_memory("more than 2^62");
  const size_t rounded = (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
  view.data = std::aligned_alloc(kAlignment, rounded);
  if (view.data == nullptr) no_memory(std::to_string(bytes).c_str());
  PyObject* owner =
      PyCapsule_New(view.data, kBufferName, [](PyObject* self) { std::free(PyCapsule_GetPointer(self, kBufferName)); });
  if (owner == nullptr) {
    std::free(view.data);
    throw nb::python_error();
  }
  return nb::steal(owner);
}

// `descr` is a new reference.
nb::object wrap_numpy(const Tensor& view, PyArray_Descr* descr, nb::object owner) {
  npy_intp dims[Tensor::kMaxDims];
  for (int i = 0; i < view.ndim; ++i) dims[i] = view.dims[i];
  PyObject* array =
      PyArray_NewFromDescr(&PyArray_Type, descr, view.ndim, dims, nullptr, view.data, NPY_ARRAY_CARRAY, nullptr);
  if (array == nullptr) throw nb::python_error();
  nb::object result = nb::steal(array);
  if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array), owner.release().ptr()) != 0) {
    throw nb::python_error();
  }
  return result;
}

constexpr const char* kAnyDtype = "a dtype of polyhead";

bool is_on_cuda() { return Place::current() != nullptr && Place::current()->on_cuda(); }

PyArray_Descr* numpy_descr(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return PyArray_DescrFromType(NPY_DOUBLE);
    case DType::kFloat16: return PyArray_DescrFromType(NPY_HALF);
    case DType::kBool: return PyArray_DescrFromType(NPY_BOOL);
    case DType::kInt64: return PyArray_DescrFromType(NPY_INT64);
    default: return PyArray_DescrFromType(NPY_FLOAT);
  }
}

}  // namespace

void arrays_init(nb::module_& module) {
  if (_import_array() < 0) throw nb::python_error();
  PyObject* bases = PyTuple_Pack(2, PyExc_ValueError, PyExc_RuntimeError);
  error_type = PyErr_NewExceptionWithDoc("polyhead.Error", kErrorDoc, bases, nullptr);
  Py_XDECREF(bases);
  if (error_type == nullptr) throw nb::python_error();
  module.attr("Error") = nb::handle(error_type);
}

void bad_value(const char* format, ...) {
  va_list args;
  va_start(args, format);
  set_error(error_type, format, args);
  va_end(args);
  throw nb::python_error();
}

void check_num_dims(int64_t num_dims, const ArrayArgument& argument) {
  if (num_dims >= argument.min_dims && num_dims <= argument.max_dims) return;
  if (argument.min_dims == argument.max_dims) {
    bad_value("%s has %d dimensions, must have %d: %s", argument.name, static_cast<int>(num_dims), argument.min_dims,
              argument.shape);
  }
  bad_value("%s has %d dimensions, must have %d to %d: %s", argument.name, static_cast<int>(num_dims),
            argument.min_dims, argument.max_dims, argument.shape);
}

void bad_kind(const char* format, ...) {
  va_list args;
  va_start(args, format);
  set_error(PyExc_TypeError, format, args);
  va_end(args);
  throw nb::python_error();
}

nb::object shown(std::string_view text) {
  return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

void check(const Status& status) {
  if (status.ok()) return;
  PyErr_SetObject(status.code() == StatusCode::kOutOfMemory ? PyExc_MemoryError : error_type,
                  shown(status.message()).ptr());
  throw nb::python_error();
}

const char* type_name(PyObject* object) { return Py_TYPE(object)->tp_name; }

std::optional<std::string_view> utf8_of(PyObject* text) {
  Py_ssize_t size = 0;
  const char* const utf8 = PyUnicode_AsUTF8AndSize(text, &size);
  if (utf8 == nullptr) {  // a lone surrogate
    PyErr_Clear();
    return std::nullopt;
  }
  return std::string_view(utf8, static_cast<size_t>(size));
}

std::string text_of(PyObject* object) {
  constexpr size_t kMost = 400;
  PyObject* text = PyObject_Str(object);
  PyErr_Clear();
  const auto utf8 = text != nullptr ? utf8_of(text) : std::nullopt;
  std::string result(utf8.value_or("too much to print"));  // as integers of 5000 digits are
  Py_XDECREF(text);
  result.resize(std::min(result.size(), kMost));
  for (size_t at = 0; (at = result.find('\0', at)) != result.npos;) result.replace(at, 1, "\\x00");
  return result;
}

bool is_array(PyObject* object) {
  if (PyArray_Check(object)) return true;
  return !PyType_Check(object) && (PyObject_HasAttrString(object, "__dlpack__") || has_cuda_interface(object));
}

bool is_on_host(PyObject* object) {
  if (PyArray_Check(object)) return true;
  return is_torch_tensor(object) && !nb::cast<bool>(nb::handle(object).attr("is_cuda"));
}

Tensor view_of(PyObject* object, const ArrayArgument& argument, Held& held) {
  if (PyArray_Check(object)) return view_of_numpy(reinterpret_cast<PyArrayObject*>(object), argument);
  const bool is_type = PyType_Check(object);
  if (!is_type && PyObject_HasAttrString(object, "__dlpack__")) return view_of_dlpack(object, argument, held);
  if (!is_type && has_cuda_interface(object)) return view_of_cuda_interface(object, argument);
  bad_kind("%s has type %s, must be an array of %s: NumPy's, or any with __dlpack__", argument.name, type_name(object),
           argument.dtypes);
}

Tensor writable_view_of(PyObject* object, const ArrayArgument& argument, Held& held) {
  if (PyArray_Check(object)) {
    auto* array = reinterpret_cast<PyArrayObject*>(object);
    if (!PyArray_ISWRITEABLE(array)) bad_value("%s is read-only, must be writable", argument.name);
    return view_of_numpy(array, argument);
  }
  if (!is_torch_tensor(object) && has_cuda_interface(object)) {
    const nb::object data = nb::object(nb::handle(object).attr("__cuda_array_interface__")["data"]);
    if (nb::cast<bool>(nb::object(data[1]))) bad_value("%s is read-only, must be writable", argument.name);
    return view_of_cuda_interface(object, argument);
  }
  if (is_device_array(object)) return view_of_dlpack(object, argument, held);  // its interface cannot name bfloat16
  if (!is_torch_tensor(object)) {  // DLPack has no way to ask some of the others, jax's are never to be written
    bad_kind("%s has type %s, must be a NumPy array or a torch tensor", argument.name, type_name(object));
  }
  if (nb::cast<bool>(nb::handle(object).attr("is_neg")())) {
    bad_value("%s is negated lazily, so it cannot be written in place: pass a tensor of its own", argument.name);
  }
  return view_of_dlpack(object, argument, held);
}

Results::Results(const char* name, PyObject* like, DType dtype) : like_(like), dtype_(dtype) {
  if (is_on_cuda()) return;
  if (!PyArray_Check(like) && !is_torch_tensor(like)) from_dlpack_ = from_dlpack_of(name, like);
}

nb::object Results::make(Tensor& view) {
  if (is_on_cuda()) {
    nb::object array = Place::current()->new_array(like_, view, dtype_name(view.dtype));
    Held held;
    view = view_of(array.ptr(), {"a result", kAnyDtype, view.ndim, view.ndim, "what was asked for"}, held);
    return array;
  }
  nb::object owner = allocate(view);
  if (!PyArray_Check(like_)) {
    size_t shape[Tensor::kMaxDims];
    for (int i = 0; i < view.ndim; ++i) shape[i] = static_cast<size_t>(view.dims[i]);
    const auto dtype = *dlpack_dtype(view.dtype);
    constexpr int kCpu = nb::device::cpu::value;
    const auto num_dims = static_cast<size_t>(view.ndim);
    if (from_dlpack_.is_valid()) {
      nb::ndarray<nb::array_api> provider(view.data, num_dims, shape, owner, nullptr, dtype, kCpu);
      return from_dlpack_(nb::cast(provider, nb::rv_policy::reference));
    }
    nb::ndarray<> array(view.data, num_dims, shape, owner, nullptr, dtype, kCpu);
    return nb::handle(torch().from_dlpack)(nb::cast(array, nb::rv_policy::reference));  // casts to a bare capsule
  }
  PyArray_Descr* descr = nullptr;
  if (view.dtype == dtype_) {
    descr = PyArray_DESCR(reinterpret_cast<PyArrayObject*>(like_));  // the only way to name bfloat16
    Py_INCREF(descr);
  } else {
    descr = numpy_descr(view.dtype);
  }
  return wrap_numpy(view, descr, std::move(owner));
}

nb::object cuda_capsule(nb::object owner, const Tensor& view, int device) {
  size_t shape[Tensor::kMaxDims];
  for (int i = 0; i < view.ndim; ++i) shape[i] = static_cast<size_t>(view.dims[i]);
  nb::ndarray<> array(view.data, static_cast<size_t>(view.ndim), shape, owner, view.strides, *dlpack_dtype(view.dtype),
                      nb::device::cuda::value, device);
  return nb::cast(array, nb::rv_policy::reference);
}

nb::object new_numpy_array(Tensor& view) {
  nb::object owner = allocate(view);
  return wrap_numpy(view, numpy_descr(view.dtype), std::move(owner));
}

}  // namespace polyhead::python
