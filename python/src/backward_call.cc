#include "backward_call.h"

#include <cstring>
#include <utility>

#include "scalars.h"
#include "workspace.h"

namespace polyhead::python {
namespace {

constexpr const char* kNames =
    "\"query\", \"key\", \"value\", \"attn_bias\", \"alibi_slopes\", \"sink_logits\" or what is captured";
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

template <class Source>
std::string into_name(const Source& source) {
  return "into[\"" + source.name + "\"]";
}

}  // namespace

BackwardCall::BackwardCall(PyObject* const* arguments) : Call(arguments) {
  backward_.accumulate = flag_argument(arguments_[kAccumulate], "accumulate");
  read_arrays();
  if (arguments_[kGradDtype] != Py_None) desc_.grad_dtype = dtype_argument(arguments_[kGradDtype], "grad_dtype");
  list_sources();
  read_needs();
  read_into();
}

void BackwardCall::list_sources() {
  const auto add = [&](std::string name, PyObject* array, Tensor* gradient, const Tensor& input) -> Source& {
    return sources_.emplace_back(Source{std::move(name), array, gradient, input, input.dtype});
  };
  const DType grad = grad_dtype(desc_);
  add("query", arguments_[kQuery], &backward_.grad_query, args_.query).input.dtype = grad;
  add("key", arguments_[kKey], &backward_.grad_key, args_.key).input.dtype = grad;
  add("value", arguments_[kValue], &backward_.grad_value, args_.value).input.dtype = grad;
  add("attn_bias", arguments_[kAttnBias], &backward_.grad_attn_bias, given_attn_bias());
  add("alibi_slopes", arguments_[kAlibiSlopes], &backward_.grad_alibi_slopes, args_.alibi_slopes);
  add("sink_logits", arguments_[kSinkLogits], &backward_.grad_sink_logits, args_.sink_logits);
  for (size_t i = 0; i < args_.captures.size(); ++i) {
    const Capture& capture = desc_.program->captures()[i];
    for (const Source& source : sources_) {
      if (source.name == capture.name)
        bad_value("%s cannot be the name of a captured tensor here", source.name.c_str());
    }
    if (capture.type == ValueType::kFloat)
      add(capture.name, captures_.array(i), &grad_captures_[i], captures_.given(i));
  }
}

void BackwardCall::read_arrays() {
  constexpr const char* kPackedOut = "[total_q, num_heads, head_dim_v] (with cu_seqlens)";
  constexpr const char* kPackedSums = "[num_heads, total_q] (with cu_seqlens)";
  const auto array = [&](Position position, const ArrayArgument& argument, const char* packed_shape) {
    return view_of(arguments_[position], desc_.packed ? packed(argument, packed_shape) : argument,
                   held_[position - kGradOut]);
  };
  backward_.grad_out = array(kGradOut, kGradOutArray, kPackedOut);
  // Without a softmax neither is needed, and there is no logsumexp.
  const bool softmax = desc_.normalizer == Normalizer::kSoftmax;
  if (softmax || arguments_[kOut] != Py_None) args_.out = array(kOut, kOutArray, kPackedOut);
  if (softmax || arguments_[kLogsumexp] != Py_None) args_.logsumexp = array(kLogsumexp, kLogsumexpArray, kPackedSums);
  if (arguments_[kGradLogsumexp] != Py_None) {
    backward_.grad_logsumexp = array(kGradLogsumexp, kGradLogsumexpArray, kPackedSums);
  }
  // Out, or without it grad_out, tells by itself whether it was asked for in float32; any other dtype than query's is
  // refused as out's.
  const bool wider = desc_.dtype == DType::kBFloat16 || desc_.dtype == DType::kFloat16;
  if (wider && (args_.out.given() ? args_.out : backward_.grad_out).dtype == DType::kFloat32)
    desc_.out_dtype = DType::kFloat32;
}

BackwardCall::Source& BackwardCall::source_named(PyObject* name, int at) {
  if (!PyUnicode_Check(name)) bad_kind("needs[%d] has type %s, must be %s", at, type_name(name), kNames);
  for (Source& source : sources_) {
    if (PyUnicode_CompareWithASCIIString(name, source.name.c_str()) == 0) return source;
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
    if (source.array == Py_None) {
      bad_value("needs[%d] is \"%s\", but %s is not given", i, source.name.c_str(), source.name.c_str());
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
      if (backward_.accumulate) bad_value("accumulate is True, so into must hold \"%s\" too", source.name.c_str());
      continue;
    }
    ++found;
    const std::string name = into_name(source);
    const ArrayArgument argument{name.c_str(), kFloats, source.input.ndim, source.input.ndim, "the shape of its input"};
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
    bad_value("%s is %s, must be %s as %s", into_name(source).c_str(), dtype_name(view.dtype),
              dtype_name(source.input.dtype), source.input.dtype != source.like ? "grad_dtype" : source.name.c_str());
  }
  for (int i = 0; i < view.ndim; ++i) {
    if (view.dims[i] != source.input.dims[i]) {
      bad_value("%s dim %d is %lld, must be %lld as %s's", into_name(source).c_str(), i,
                static_cast<long long>(view.dims[i]), static_cast<long long>(source.input.dims[i]),
                source.name.c_str());
    }
  }
}

void BackwardCall::set_gradient(const Source& source, const Tensor& view) {
  *source.gradient = source.gradient == &backward_.grad_attn_bias ? widened_to_4d(view) : as_capture(view);
}

nb::object BackwardCall::run(const Plan& plan) {
  nb::dict gradients;
  for (int i = 0; i < PyTuple_GET_SIZE(needs_.ptr()); ++i) {
    const Source& source = source_named(PyTuple_GET_ITEM(needs_.ptr(), i), i);
    const char* const name = source.name.c_str();
    if (gradients.contains(name)) continue;
    nb::object array = source.into;
    if (!array.is_valid()) {
      Tensor view = source.input;
      array = Results(name, source.array, source.like).make(view);
      set_gradient(source, view);
    }
    gradients[name] = array;
  }
  if (gradients.size() == 0) return gradients;

  backward_.forward = args_;
  backward_.grad_captures = {grad_captures_.data(), args_.captures.size()};
  ForwardArgs& forward = backward_.forward;
  forward.workspace_bytes = plan.backward_workspace_bytes();
  place_.run_in_workspace(forward.workspace_bytes, [&](void* workspace) {
    forward.workspace = workspace;
    return plan.backward(backward_);
  });
  return gradients;
}

}  // namespace polyhead::python
