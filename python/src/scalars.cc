#include "scalars.h"

#include <cstring>
#include <optional>
#include <string>

namespace polyhead::python {
namespace {

// An int of Python, NumPy, torch...: whatever has __index__.
nb::object integer_argument(PyObject* object, const char* name, const char* takes = "an integer") {
  PyObject* number = PyBool_Check(object) ? nullptr : PyNumber_Index(object);
  if (number == nullptr) {
    PyErr_Clear();
    bad_kind("%s has type %s, must be %s", name, type_name(object), takes);
  }
  return nb::steal(number);
}

uint64_t unsigned_argument(PyObject* object, const char* name, uint64_t last, const char* last_text) {
  nb::object number = integer_argument(object, name);
  const uint64_t value = PyLong_AsUnsignedLongLong(number.ptr());
  if (PyErr_Occurred() != nullptr || value > last) {
    PyErr_Clear();
    bad_value("%s is %s, must be 0 to %s", name, text_of(number.ptr()).c_str(), last_text);
  }
  return value;
}

}  // namespace

// True, False, or NumPy's. Anything else is more likely an argument in the wrong place.
bool flag_argument(PyObject* object, const char* name) {
  if (object == Py_True) return true;
  if (object == Py_False) return false;
  if (std::strcmp(type_name(object), "numpy.bool") == 0 || std::strcmp(type_name(object), "numpy.bool_") == 0) {
    return PyObject_IsTrue(object) == 1;
  }
  bad_kind("%s has type %s, must be True or False", name, type_name(object));
}

int64_t int64_argument(PyObject* object, const char* name, const char* takes) {
  nb::object number = integer_argument(object, name, takes);
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) bad_value("%s is %s, must be -2^63 to 2^63 - 1", name, text_of(number.ptr()).c_str());
  return value;
}

double real_argument(PyObject* object, const char* name) {
  const double value = PyUnicode_Check(object) ? -1 : PyFloat_AsDouble(object);
  if (PyUnicode_Check(object) || (value == -1 && PyErr_Occurred() != nullptr)) {
    const bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError);
    PyErr_Clear();
    if (too_large) bad_value("%s is %s, must be a finite number", name, text_of(object).c_str());
    bad_kind("%s has type %s, must be a number", name, type_name(object));
  }
  return value;
}

uint64_t seed_argument(PyObject* object) { return unsigned_argument(object, "dropout_seed", UINT64_MAX, "2^64 - 1"); }

void* handle_argument(PyObject* object, const char* name) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(unsigned_argument(object, name, UINT64_MAX, "2^64 - 1")));
}

uint32_t dropout_offset_argument(PyObject* object) {
  return static_cast<uint32_t>(unsigned_argument(object, "dropout_offset", UINT32_MAX, "2^32 - 1"));
}

nb::object sequence_argument(PyObject* object, const char* name, Py_ssize_t size, const char* takes) {
  nb::object items;
  if (!PyUnicode_Check(object)) items = nb::steal(PySequence_Fast(object, ""));
  if (!items.is_valid()) {
    PyErr_Clear();
    bad_kind("%s has type %s, must be %s", name, type_name(object), takes);
  }
  if (PySequence_Fast_GET_SIZE(items.ptr()) != size) {
    bad_value("%s has %zd elements, must be %s", name, PySequence_Fast_GET_SIZE(items.ptr()), takes);
  }
  return items;
}

DropoutOrigin dropout_origin_argument(PyObject* object) {
  DropoutOrigin origin;
  if (object == Py_None) return origin;
  const nb::object items = sequence_argument(
      object, "dropout_origin", 4, "a DropoutOrigin: integers (first_head, num_heads, first_query, first_key)");
  int64_t* const fields[] = {&origin.first_head, &origin.num_heads, &origin.first_query, &origin.first_key};
  static constexpr const char* kNames[] = {"dropout_origin.first_head", "dropout_origin.num_heads",
                                           "dropout_origin.first_query", "dropout_origin.first_key"};
  for (int i = 0; i < 4; ++i) *fields[i] = int64_argument(PySequence_Fast_GET_ITEM(items.ptr(), i), kNames[i]);
  return origin;
}

DType dtype_argument(PyObject* object, const char* name) {
  nb::object named;  // a class, as numpy.float32 is
  if (PyType_Check(object)) named = nb::steal(PyObject_GetAttrString(object, "__name__"));
  PyErr_Clear();
  const std::string text = text_of(named.is_valid() ? named.ptr() : object);
  const std::string word = text.substr(text.rfind('.') + 1);  // "torch.float32"
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    if (word == dtype_name(dtype)) return dtype;
  }
  constexpr const char* kTakes = "float32 or the dtype of query";
  if (named.is_valid() || PyUnicode_Check(object)) bad_value("%s is %s, must be %s", name, text.c_str(), kTakes);
  bad_kind("%s has type %s, must be %s", name, type_name(object), kTakes);
}

std::string_view text_argument(PyObject* object, const char* name, const char* takes) {
  const auto text = PyUnicode_Check(object) ? utf8_of(object) : std::nullopt;
  if (!text) bad_kind("%s has type %s, must be %s", name, type_name(object), takes);
  if (text->find('\0') != text->npos) {
    bad_value("%s is \"%s\", must be %s: it holds a NUL character", name, text_of(object).c_str(), takes);
  }
  return *text;
}

}  // namespace polyhead::python
