#include "backward_call.h"

#include <cstring>
#include <utility>

#include "scalars.h"
#include "workspace.h"

namespace polyhead::python {
namespace {

constexpr const char* kNames = "\"query\", \"key\", \"value\", \"attn_bias\" or \"alibi_slopes\"";
constexpr const char* kSums = "float32 (float64 if query is)";

constexpr ArrayArgument kGradOutArray = {"grad_out", kFloats, 4, 4, "[batch, seqlen_q, num_heads, head_dim_v]"};
constexpr ArrayArgument kOutArray = {"out", kFloats, 4, 4, "[batch, seqlen_q, num_heads, head_dim_v]"};
constexpr ArrayArgument kLogsumexpArray = {"logsumexp", kSums, 3, 3, "[batch, num_heads, seqlen_q]"};
constexpr ArrayArgument kGradLogsumexpArray = {"grad_logsumexp", kSums, 3, 3, "[batch, num_heads, seqlen_q]"};

// Packed arrays have one dimension less.
ArrayArgument packed(ArrayArgument argument, const char* shape) {
  --argument.min_dims, --argument.max_dims;
  argument.shape = shape;
  return argument;
}

}  // namespace

BackwardCall::BackwardCall(PyObject* const* arguments) : Call(arguments) {
  backward_.accumulate = flag_argument(arguments_[kAccumulate], "accumulate");
  read_arrays();
  if (arguments_[kGradDtype] != Py_None) desc_.grad_dtype = dtype_argument(arguments_[kGradDtype], "grad_dtype");
  sources_ = {{
      {"query", "into[\"query\"]", kQuery, &BackwardArgs::grad_query, args_.query},
      {"key", "into[\"key\"]", kKey, &BackwardArgs::grad_key, args_.key},
      {"value", "into[\"value\"]", kValue, &BackwardArgs::grad_value, args_.value},
      {"attn_bias", "into[\"attn_bias\"]", kAttnBias, &BackwardArgs::grad_attn_bias, given_attn_bias()},
      {"alibi_slopes", "into[\"alibi_slopes\"]", kAlibiSlopes, &BackwardArgs::grad_alibi_slopes, args_.alibi_slopes},
  }};
  for (Source& source : sources_) {
    if (source.position <= kValue) source.input.dtype = grad_dtype(desc_);
  }
  read_needs();
  read_into();
}

void BackwardCall::read_arrays() {
  constexpr const char* kPackedOut = "[total_q, num_heads, head_dim_v] (with cu_seqlens)";
  constexpr const char* kPackedSums = "[num_heads, total_q] (with cu_seqlens)";
  const auto array = [&](Position position, const ArrayArgument& argument, const char* packed_shape) {
    return view_of(arguments_[position], desc_.packed ? packed(argument, packed_shape) : argument,
                   held_[position - kGradOut]);
  };
  backward_.grad_out = array(kGradOut, kGradOutArray, kPackedOut);
  args_.out = array(kOut, kOutArray, kPackedOut);
  args_.logsumexp = array(kLogsumexp, kLogsumexpArray, kPackedSums);
  if (arguments_[kGradLogsumexp] != Py_None) {
    backward_.grad_logsumexp = array(kGradLogsumexp, kGradLogsumexpArray, kPackedSums);
  }
  // Out tells by itself whether it was asked for in float32; any other dtype than query's is refused as out's.
  const bool wider = desc_.dtype == DType::kBFloat16 || desc_.dtype == DType::kFloat16;
  if (wider && args_.out.dtype == DType::kFloat32) desc_.out_dtype = DType::kFloat32;
}

BackwardCall::Source& BackwardCall::source_named(PyObject* name, int at) {
  if (!PyUnicode_Check(name)) bad_kind("needs[%d] has type %s, must be %s", at, type_name(name), kNames);
  for (Source& source : sources_) {
    if (PyUnicode_CompareWithASCIIString(name, source.name) == 0) return source;
  }
  bad_value("needs[%d] is \"%s\", must be %s", at, text_of(name).c_str(), kNames);
}

void BackwardCall::read_needs() {
  PyObject* needs = arguments_[kNeeds];
  if (!PyUnicode_Check(needs)) needs_ = nb::steal(PySequence_Tuple(needs));
  if (!needs_.is_valid()) {
    PyErr_Clear();
    bad_kind("needs has type %s, must be a sequence of names: %s", type_name(needs), kNames);
  }
  for (int i = 0; i < PyTuple_GET_SIZE(needs_.ptr()); ++i) {
    PyObject* name = PyTuple_GET_ITEM(needs_.ptr(), i);
    Source& source = source_named(name, i);
    if (arguments_[source.position] == Py_None) {
      bad_value("needs[%d] is \"%s\", but %s is not given", i, source.name, source.name);
    }
    source.needed_as = name;
  }
}

// The names in needs_ are looked up in `into`, so that nothing goes through a dict that other threads may change.
void BackwardCall::read_into() {
  PyObject* into = arguments_[kInto];
  if (into == Py_None) {
    if (backward_.accumulate) bad_value("accumulate is True, so into must be given: the arrays to add to");
    return;
  }
  if (!PyDict_Check(into)) bad_kind("into has type %s, must be a dict of arrays", type_name(into));
  Py_ssize_t found = 0;
  for (Source& source : sources_) {
    if (source.needed_as == nullptr) continue;
    source.into = nb::borrow(PyDict_GetItemWithError(into, source.needed_as));
    if (!source.into.is_valid()) {
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      if (backward_.accumulate) bad_value("accumulate is True, so into must hold \"%s\" too", source.name);
      continue;
    }
    ++found;
    const ArrayArgument argument{source.into_name, kFloats, source.input.ndim, source.input.ndim,
                                 "the shape of its input"};
    const Tensor view = writable_view_of(source.into.ptr(), argument, source.held);
    check_into(source, view);
    set_gradient(source, view);
  }
  if (found == PyDict_Size(into)) return;
  nb::object names = nb::steal(PyDict_Keys(into));
  if (!names.is_valid()) throw nb::python_error();
  for (nb::handle name : names) {
    if (PySequence_Contains(needs_.ptr(), name.ptr()) != 1) {
      PyErr_Clear();
      bad_value("into holds \"%s\", which needs does not name", text_of(name.ptr()).c_str());
    }
  }
}

void BackwardCall::check_into(const Source& source, const Tensor& view) const {
  if (view.dtype != source.input.dtype) {
    bad_value("%s is %s, must be %s as %s", source.into_name, dtype_name(view.dtype), dtype_name(source.input.dtype),
              source.position <= kValue && desc_.grad_dtype ? "grad_dtype" : source.name);
  }
  for (int i = 0; i < view.ndim; ++i) {
    if (view.dims[i] != source.input.dims[i]) {
      bad_value("%s dim %d is %lld, must be %lld as %s's", source.into_name, i, static_cast<long long>(view.dims[i]),
                static_cast<long long>(source.input.dims[i]), source.name);
    }
  }
}

void BackwardCall::set_gradient(const Source& source, const Tensor& view) {
  backward_.*source.gradient = source.position == kAttnBias ? widened_to_4d(view) : view;
}

nb::object BackwardCall::run(const Plan& plan) {
  nb::dict gradients;
  for (int i = 0; i < PyTuple_GET_SIZE(needs_.ptr()); ++i) {
    const Source& source = source_named(PyTuple_GET_ITEM(needs_.ptr(), i), i);
    if (gradients.contains(source.name)) continue;
    nb::object array = source.into;
    if (!array.is_valid()) {
      Tensor view = source.input;
      const DType like = source.position <= kValue ? desc_.dtype : view.dtype;
      array = Results(source.name, arguments_[source.position], like).make(view);
      set_gradient(source, view);
    }
    gradients[source.name] = array;
  }
  if (gradients.size() == 0) return gradients;

  backward_.forward = args_;
  run_without_gil([&] { return backward_with_workspace(plan, backward_); });
  return gradients;
}

}  // namespace polyhead::python
