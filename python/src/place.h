// Where the arrays of a call lie, and where it is computed: in the host's memory, or on a CUDA device in the order of one
// of its streams.
#pragma once

#include <Python.h>

#include <optional>

#include "arrays.h"
#include "on_device.h"
#include "polyhead/attention.h"
#include "workspace.h"

namespace polyhead::python {

// Of one call, as long as that is made. On a CUDA device it is the thread's current one meanwhile.
class Place {
 public:
  // As `query` lies. `stream` is an address, or None: where query's package puts its own work now.
  Place(PyObject* query, PyObject* stream);
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  // Of the call that this thread is making; null: none, or one that knows the host's memory alone.
  static const Place* current();

  bool on_cuda() const { return device_ >= 0; }
  int device() const { return device_; }
  void* stream() const { return stream_; }

  // A new array of the kind of `like`, or, where its package is not known, a polyhead.DeviceArray.
  nb::object new_array(PyObject* like, const Tensor& shape, const char* dtype) const;

  // Where a plan is made for calls here, and where they run: the threads of `executor`, or the stream.
  Where where(Executor* executor) const;

  // check(run(workspace)), in a workspace of `bytes` here, while other Python threads run.
  template <class Run>
  void run_in_workspace(size_t bytes, const Run& run) const {
    if (!on_cuda()) return run_without_gil([&] { return in_scratch(bytes, run); });
    void* memory = nullptr;
    const nb::object workspace = new_workspace(bytes, &memory);
    run_without_gil([&] { return run(memory); });
  }

 private:
  nb::object new_workspace(size_t bytes, void** memory) const;

  nb::object query_;
  int device_ = -1;
  void* stream_ = nullptr;
  std::optional<OnDevice> on_device_;
  const Place* before_ = nullptr;
};

// Whether `object` is a polyhead.DeviceArray.
bool is_device_array(PyObject* object);

// Whether `object` has what tells of memory on a CUDA device, as CuPy's and Numba's arrays do.
bool has_cuda_interface(PyObject* object);

// A view of it; work that is put on the place's stream from here on runs after what fills it.
Tensor view_of_cuda_interface(PyObject* object, const ArrayArgument& argument);

// What __dlpack__ gives, ready on the stream of the place that is the current one.
nb::object dlpack_of(PyObject* object);

// Refuses memory of another place than the call's.
void check_place(const ArrayArgument& argument, int device_type, int device);

// CUDA's memory and streams for Python (polyhead/_cuda_arrays.py).
void add_cuda(nb::module_& module);

}  // namespace polyhead::python
