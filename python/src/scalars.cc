#include "scalars.h"

#include <cstring>

#include "arrays.h"

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

uint32_t dropout_offset_argument(PyObject* object) {
  return static_cast<uint32_t>(unsigned_argument(object, "dropout_offset", UINT32_MAX, "2^32 - 1"));
}

const char* text_argument(PyObject* object, const char* name, const char* takes) {
  const char* text = PyUnicode_Check(object) ? PyUnicode_AsUTF8(object) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    bad_kind("%s has type %s, must be %s", name, type_name(object), takes);
  }
  return text;
}

}  // namespace polyhead::python
