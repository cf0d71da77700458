// Arguments that are no arrays: flags, numbers and words, read from Python. Each raises a sentence with its name.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string_view>

#include "arrays.h"
#include "polyhead/dropout.h"

namespace polyhead::python {

bool flag_argument(PyObject* object, const char* name);
int64_t int64_argument(PyObject* object, const char* name, const char* takes = "an integer");
double real_argument(PyObject* object, const char* name);
uint64_t seed_argument(PyObject* object);                   // 0 .. 2^64-1
void* handle_argument(PyObject* object, const char* name);  // the address, as a number
uint32_t dropout_offset_argument(PyObject* object);         // 0 .. 2^32-1

// Of so many items, for PySequence_Fast_GET_ITEM; no text.
nb::object sequence_argument(PyObject* object, const char* name, Py_ssize_t size, const char* takes);

DropoutOrigin dropout_origin_argument(PyObject* object);  // None: the default

// "float32", or a dtype of NumPy, torch, ...: what is called so. Of the floating-point dtypes.
DType dtype_argument(PyObject* object, const char* name);

// As long as `object` lives. Without a NUL.
std::string_view text_argument(PyObject* object, const char* name, const char* takes);

}  // namespace polyhead::python
