#include "merge_call.h"

#include <string>
#include <vector>

#include "call.h"
#include "polyhead/merge.h"
#include "threads.h"

namespace polyhead::python {
namespace {

constexpr const char* kOutShape = "[batch, seqlen_q, num_heads, head_dim_v], packed [total_q, num_heads, head_dim_v]";
constexpr const char* kSumsShape = "[batch, num_heads, seqlen_q], packed [num_heads, total_q]";

// Whether an out may have this dtype beside another of these.
bool mixable(DType dtype) { return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16; }

// Dims and dtypes of all parts, by those of outs[0].
Partial shape_of(const Tensor& out) {
  const DType dtype = out.dtype;
  if (!mixable(dtype) && dtype != DType::kFloat64) {
    bad_value("outs[0] is %s, must be %s", dtype_name(dtype), kFloats);
  }
  const DType sums = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  return {out, out.ndim == 3 ? Tensor(nullptr, sums, {out.dims[1], out.dims[0]})
                             : Tensor(nullptr, sums, {out.dims[0], out.dims[2], out.dims[1]})};
}

std::string dims_text(const Tensor& t) {
  std::string text = "[";
  for (int i = 0; i < t.ndim; ++i) text += (i > 0 ? ", " : "") + std::to_string(t.dims[i]);
  return text + "]";
}

void check_like(const std::string& name, const Tensor& view, const Tensor& expected) {
  if (view.dtype != expected.dtype) {
    bad_value("%s is %s, must be %s as the dtype of outs[0] wants", name.c_str(), dtype_name(view.dtype),
              dtype_name(expected.dtype));
  }
  bool same = view.ndim == expected.ndim;
  for (int i = 0; same && i < view.ndim; ++i) same = view.dims[i] == expected.dims[i];
  if (!same) {
    bad_value("%s is %s, must be %s as the shape of outs[0] wants", name.c_str(), dims_text(view).c_str(),
              dims_text(expected).c_str());
  }
}

void check_out_like(const std::string& name, const Tensor& view, Tensor expected) {
  if (mixable(view.dtype) && mixable(expected.dtype)) expected.dtype = view.dtype;
  check_like(name, view, expected);
}

// A sequence of arrays as a tuple of our own, which no other thread can change.
nb::object parts_argument(PyObject* parts, const char* name) {
  nb::object arrays;
  if (!PyDict_Check(parts) && !PyUnicode_Check(parts)) arrays = nb::steal(PySequence_Tuple(parts));
  if (!arrays.is_valid()) {
    PyErr_Clear();
    bad_kind("%s has type %s, must be a sequence of arrays, one of each part", name, type_name(parts));
  }
  return arrays;
}

// The parts of a merge: outs and logsumexps.
class Parts {
 public:
  Parts(PyObject* outs, PyObject* logsumexps)
      : outs_(parts_argument(outs, "outs")), logsumexps_(parts_argument(logsumexps, "logsumexps")) {
    const Py_ssize_t count = PyTuple_GET_SIZE(outs_.ptr());
    if (count == 0) bad_value("outs is empty, must hold the out of each part");
    if (PyTuple_GET_SIZE(logsumexps_.ptr()) != count) {
      bad_value("logsumexps has %zd parts, outs has %zd", PyTuple_GET_SIZE(logsumexps_.ptr()), count);
    }
    views.resize(static_cast<size_t>(count));
    held_.resize(2 * views.size());
    for (size_t i = 0; i < views.size(); ++i) {
      views[i].out = array(out(i), name_of("outs", i), 3, 4, kOutShape, held_[2 * i]);
      if (i == 0) shape = shape_of(views[0].out);
      check_out_like(name_of("outs", i), views[i].out, shape.out);
      views[i].logsumexp = array(logsumexp(i), name_of("logsumexps", i), 2, 3, kSumsShape, held_[2 * i + 1]);
      check_like(name_of("logsumexps", i), views[i].logsumexp, shape.logsumexp);
    }
  }

  static std::string name_of(const char* parts, size_t i) { return std::string(parts) + "[" + std::to_string(i) + "]"; }

  static Tensor array(PyObject* object, const std::string& name, int min_dims, int max_dims, const char* dims,
                      Held& held) {
    return view_of(object, {name.c_str(), kFloats, min_dims, max_dims, dims}, held);
  }

  PyObject* out(size_t i) const { return PyTuple_GET_ITEM(outs_.ptr(), static_cast<Py_ssize_t>(i)); }
  PyObject* logsumexp(size_t i) const { return PyTuple_GET_ITEM(logsumexps_.ptr(), static_cast<Py_ssize_t>(i)); }

  std::vector<Partial> views;
  Partial shape;

 private:
  nb::object outs_, logsumexps_;
  std::vector<Held> held_;
};

Tensor whole_out(PyObject* object, const char* name, const Tensor& expected, Held& held) {
  const Tensor view = Parts::array(object, name, expected.ndim, expected.ndim, kOutShape, held);
  check_out_like(name, view, expected);
  return view;
}

Tensor whole_sums(PyObject* object, const char* name, const Tensor& expected, Held& held) {
  const Tensor view = Parts::array(object, name, expected.ndim, expected.ndim, kSumsShape, held);
  check_like(name, view, expected);
  return view;
}

}  // namespace

nb::object merge_parts(PyObject* const* arguments) {
  const Parts parts(arguments[0], arguments[1]);
  Partial merged = parts.shape;
  Results results("outs[0]", parts.out(0), merged.out.dtype);
  nb::object out = results.make(merged.out);
  nb::object logsumexp = results.make(merged.logsumexp);
  run_without_gil([&] { return merge(parts.views, merged, chosen_executor()); });
  return nb::make_tuple(out, logsumexp);
}

nb::object merge_parts_backward(PyObject* const* arguments) {
  const Parts parts(arguments[1], arguments[2]);
  const Partial& shape = parts.shape;
  Held held[4];
  Partial merged, grad_merged;
  grad_merged.out = whole_out(arguments[0], "grad_out", shape.out, held[0]);
  merged.out = whole_out(arguments[3], "out", shape.out, held[1]);
  merged.logsumexp = whole_sums(arguments[4], "logsumexp", shape.logsumexp, held[2]);
  if (arguments[5] != Py_None) {
    grad_merged.logsumexp = whole_sums(arguments[5], "grad_logsumexp", shape.logsumexp, held[3]);
  }

  nb::list grad_outs, grad_logsumexps;
  std::vector<Partial> gradients(parts.views.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i] = shape;
    gradients[i].out.dtype = parts.views[i].out.dtype;
    grad_outs.append(Results("outs", parts.out(i), gradients[i].out.dtype).make(gradients[i].out));
    grad_logsumexps.append(
        Results("logsumexps", parts.logsumexp(i), shape.logsumexp.dtype).make(gradients[i].logsumexp));
  }
  run_without_gil([&] { return merge_backward(parts.views, merged, grad_merged, gradients, chosen_executor()); });
  return nb::make_tuple(grad_outs, grad_logsumexps);
}

}  // namespace polyhead::python
