// polyhead.attention_backward's call.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "call.h"

namespace polyhead::python {

class BackwardCall : public Call {
 public:
  explicit BackwardCall(PyObject* const* arguments);

  // Makes the gradients that `into` does not hold and computes all, without the GIL: {name: array}, in order of needs.
  nb::object run(const Plan& plan);

 private:
  // An input that has a gradient.
  struct Source {
    std::string name;
    PyObject* array;  // None: not given
    Tensor* gradient;
    Tensor input;                   // as given: attn_bias may have fewer dims than 4; in the gradient's dtype
    DType like;                     // of `array`
    PyObject* needed_as = nullptr;  // its name in needs_; null: not needed
    nb::object into = {};
    Held held = {};
  };

  void read_arrays();
  void list_sources();
  void read_needs();
  void read_into();
  Source& source_named(PyObject* name, int at);
  void check_into(const Source& source, const Tensor& view) const;
  void set_gradient(const Source& source, const Tensor& view);

  BackwardArgs backward_;
  std::vector<Source> sources_;
  std::array<Tensor, Program::kMostCaptures> grad_captures_;
  nb::object needs_;  // a tuple of names, some perhaps more than once
  std::array<Held, 4> held_;
};

}  // namespace polyhead::python
