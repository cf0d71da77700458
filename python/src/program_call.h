// The program of a call and the tensors that it captures, as the library wants them.
#pragma once

#include <Python.h>

#include <array>

#include "arrays.h"
#include "capture.h"
#include "polyhead/attention.h"

namespace polyhead::python {

// What a call captures, in the program's order. Its tensors point into this.
class Captures {
 public:
  // program: its text, or None; captured: a dict of arrays by name, or None. Into the desc and args.
  void read(PyObject* program, PyObject* captured, AttentionDesc& desc, ForwardArgs& args);

  PyObject* array(size_t at) const { return arrays_[at].ptr(); }
  const Tensor& given(size_t at) const { return given_[at]; }  // as given: of 0 dims too

 private:
  std::array<nb::object, Program::kMostCaptures> arrays_;
  std::array<Held, Program::kMostCaptures> held_;
  std::array<Tensor, Program::kMostCaptures> given_, tensors_;
};

}  // namespace polyhead::python
