// Arguments that are no arrays: flags, numbers and words, read from Python. Each raises a sentence with its name.
#pragma once

#include <Python.h>

#include <cstdint>

namespace polyhead::python {

bool flag_argument(PyObject* object, const char* name);
int64_t int64_argument(PyObject* object, const char* name, const char* takes = "an integer");
double real_argument(PyObject* object, const char* name);
uint64_t seed_argument(PyObject* object);            // 0 .. 2^64-1
uint32_t dropout_offset_argument(PyObject* object);  // 0 .. 2^32-1

// As long as `object` lives.
const char* text_argument(PyObject* object, const char* name, const char* takes);

}  // namespace polyhead::python
