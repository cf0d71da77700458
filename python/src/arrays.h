// Arrays of Python <-> polyhead::Tensor, without a copy: NumPy through its C layout, anything else through DLPack, or, on a
// CUDA device, through __cuda_array_interface__. Where they must lie is told by the call's Place (place.h).
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead::python {

namespace nb = nanobind;

// Loads NumPy's C interface and makes polyhead.Error. Called once, when the module is imported.
void arrays_init(nb::module_& module);

// Raise polyhead.Error (the value is wrong) or TypeError (no such kind of object is taken), with a printf sentence.
[[noreturn, gnu::format(printf, 1, 2)]] void bad_value(const char* format, ...);
[[noreturn, gnu::format(printf, 1, 2)]] void bad_kind(const char* format, ...);

// A str, whatever bytes a file's names have: those that are no UTF-8 become U+FFFD.
nb::object shown(std::string_view text);

// Raises what `status` says, if it is not ok.
void check(const Status& status);

template <class T>
T checked(Result<T> result) {
  check(result.status());
  return std::move(*result);
}

// check(run()), while other Python threads run.
template <class Run>
void run_without_gil(Run run) {
  Status status;
  {
    nb::gil_scoped_release without_gil;
    status = run();
  }
  check(status);
}

// The name of the object's type, and the beginning of str(object): for sentences.
const char* type_name(PyObject* object);
std::string text_of(PyObject* object);

// Of a str, as long as it lives; none for what is no UTF-8.
std::optional<std::string_view> utf8_of(PyObject* text);

// Keeps the memory of an imported DLPack array alive. Empty for a NumPy array: the caller holds that.
using Held = nb::ndarray<nb::ro>;

// An argument that has to be an array: what to call it, and what to say of it when it cannot be one of ours.
struct ArrayArgument {
  const char* name;
  const char* dtypes;  // "float32, bfloat16, float16 or float64"
  int min_dims;
  int max_dims;
  const char* shape;    // "[batch, seqlen_q, num_heads, head_dim]"
  bool stored = false;  // may be of a dtype that scales go with: int8, float8, pairs of int4 (uint8)
};

// Refuses another number of dimensions than the argument may have.
void check_num_dims(int64_t num_dims, const ArrayArgument& argument);

// A view of `object`. Sizes and dtypes are checked where the library cannot: a Tensor has only so many of both.
Tensor view_of(PyObject* object, const ArrayArgument& argument, Held& held);

// Likewise, of an array that is to be written: of NumPy, a torch tensor, or one with __cuda_array_interface__.
Tensor writable_view_of(PyObject* object, const ArrayArgument& argument, Held& held);

// Whether `object` is an array: of NumPy, or with __dlpack__ or __cuda_array_interface__.
bool is_array(PyObject* object);

// Whether it is one in the host's memory, as can be told at once: NumPy's, or a torch tensor that is not on CUDA.
bool is_on_host(PyObject* object);

// Makes results of the same kind of array as `like`, the argument `name`: for the call's Place.
class Results {
 public:
  // `like`, whose dtype is given, has passed view_of(). Borrows it.
  Results(const char* name, PyObject* like, DType dtype);

  // A new array of `view`'s dtype and dims, uninitialised, contiguous, 64-byte aligned; `view` becomes its view.
  nb::object make(Tensor& view);

 private:
  PyObject* like_;
  DType dtype_;
  nb::object from_dlpack_;  // of its package; empty: NumPy, or torch
};

// A new NumPy array, as Results makes it.
nb::object new_numpy_array(Tensor& view);

// A DLPack capsule of memory on a CUDA device, which `owner` holds.
nb::object cuda_capsule(nb::object owner, const Tensor& view, int device);

}  // namespace polyhead::python
