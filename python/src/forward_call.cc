// What polyhead.attention returns, and how it is computed.
#include <utility>

#include "call.h"
#include "scalars.h"
#include "workspace.h"

namespace polyhead::python {
namespace {

void append(nb::object& results, int& count, nb::object array) {
  PyTuple_SET_ITEM(results.ptr(), count++, array.release().ptr());
}

}  // namespace

ReturnWeights return_weights_argument(PyObject* object) {
  if (PyUnicode_Check(object)) {
    if (PyUnicode_CompareWithASCIIString(object, "mean") == 0) return ReturnWeights::kMean;
    bad_value("return_weights is \"%s\", must be True, False or \"mean\"", text_of(object).c_str());
  }
  return flag_argument(object, "return_weights") ? ReturnWeights::kPerHead : ReturnWeights::kNone;
}

ForwardCall::ForwardCall(PyObject* const* arguments) : Call(arguments, arguments + kPageTable) {
  return_logsumexp_ = flag_argument(arguments_[kReturnLogsumexp], "return_logsumexp");
  if (return_logsumexp_ && desc_.normalizer == Normalizer::kNone) {
    bad_value("return_logsumexp is True, but normalizer is \"none\": there is no logsumexp");
  }
  desc_.return_column_sums = flag_argument(arguments_[kReturnColumnSums], "return_column_sums");
  if (arguments_[kOutDtype] != Py_None) desc_.out_dtype = dtype_argument(arguments_[kOutDtype], "out_dtype");
  desc_.return_weights = return_weights_argument(arguments_[kReturnWeights]);
  read_result();
}

// Out tells by itself whether it is wanted in float32; any other dtype than query's is refused as out's.
void ForwardCall::read_result() {
  if (arguments_[kResult] == Py_None) return;
  constexpr ArrayArgument kOut = {"out", kFloats, 4, 4, "[batch, seqlen_q, num_heads, head_dim_v]"};
  constexpr ArrayArgument kPackedOut = {"out", kFloats, 3, 3, "[total_q, num_heads, head_dim_v] (with cu_seqlens)"};
  args_.out = writable_view_of(arguments_[kResult], desc_.packed ? kPackedOut : kOut, held_result_);
  const bool wider = desc_.dtype == DType::kBFloat16 || desc_.dtype == DType::kFloat16;
  if (wider && args_.out.dtype == DType::kFloat32 && !desc_.out_dtype) desc_.out_dtype = DType::kFloat32;
}

nb::object ForwardCall::run(const Plan& plan) {
  const AttentionDesc& d = desc_;
  Results results("query", arguments_[kQuery], d.dtype);
  const auto make = [&](Tensor ForwardArgs::*tensor) {
    args_.*tensor = expected_tensor(d, tensor);
    return results.make(args_.*tensor);
  };
  nb::object returned = args_.out.given() ? nb::borrow(arguments_[kResult]) : make(&ForwardArgs::out);
  const int num_extra =
      int{return_logsumexp_} + int{d.return_weights != ReturnWeights::kNone} + int{d.return_column_sums};
  if (num_extra > 0) {
    nb::object all = nb::steal(PyTuple_New(1 + num_extra));
    if (!all.is_valid()) throw nb::python_error();
    int count = 0;
    append(all, count, std::move(returned));
    if (return_logsumexp_) append(all, count, make(&ForwardArgs::logsumexp));
    if (d.return_weights != ReturnWeights::kNone) append(all, count, make(&ForwardArgs::attn_weights));
    if (d.return_column_sums) append(all, count, make(&ForwardArgs::column_sums));
    returned = std::move(all);
  }

  args_.workspace_bytes = plan.workspace_bytes();
  place_.run_in_workspace(args_.workspace_bytes, [&](void* workspace) {
    args_.workspace = workspace;
    return plan.forward(args_);
  });
  return returned;
}

}  // namespace polyhead::python
