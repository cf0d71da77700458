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

ForwardCall::ForwardCall(PyObject* const* arguments) : Call(arguments) {
  return_logsumexp_ = flag_argument(arguments_[kReturnLogsumexp], "return_logsumexp");
  desc_.return_column_sums = flag_argument(arguments_[kReturnColumnSums], "return_column_sums");
  if (arguments_[kOutDtype] != Py_None) desc_.out_dtype = dtype_argument(arguments_[kOutDtype], "out_dtype");
  PyObject* weights = arguments_[kReturnWeights];
  if (PyUnicode_Check(weights)) {
    if (PyUnicode_CompareWithASCIIString(weights, "mean") != 0) {
      bad_value("return_weights is \"%s\", must be True, False or \"mean\"", text_of(weights).c_str());
    }
    desc_.return_weights = ReturnWeights::kMean;
  } else if (flag_argument(weights, "return_weights")) {
    desc_.return_weights = ReturnWeights::kPerHead;
  }
}

nb::object ForwardCall::run(const Plan& plan) {
  const AttentionDesc& d = desc_;
  const DType sums = d.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  Results results("query", arguments_[kQuery], d.dtype);

  args_.out = d.packed ? Tensor(nullptr, out_dtype(d), {d.seqlen_q, d.num_heads, d.head_dim_v})
                       : Tensor(nullptr, out_dtype(d), {d.batch, d.seqlen_q, d.num_heads, d.head_dim_v});
  nb::object returned = results.make(args_.out);
  const int num_extra =
      int{return_logsumexp_} + int{d.return_weights != ReturnWeights::kNone} + int{d.return_column_sums};
  if (num_extra > 0) {
    nb::object all = nb::steal(PyTuple_New(1 + num_extra));
    if (!all.is_valid()) throw nb::python_error();
    int count = 0;
    append(all, count, std::move(returned));
    if (return_logsumexp_) {
      args_.logsumexp = d.packed ? Tensor(nullptr, sums, {d.num_heads, d.seqlen_q})
                                 : Tensor(nullptr, sums, {d.batch, d.num_heads, d.seqlen_q});
      append(all, count, results.make(args_.logsumexp));
    }
    if (d.return_weights != ReturnWeights::kNone) {
      args_.weights = d.return_weights == ReturnWeights::kMean
                          ? Tensor(nullptr, d.dtype, {d.batch, d.seqlen_q, d.seqlen_k})
                          : Tensor(nullptr, d.dtype, {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k});
      append(all, count, results.make(args_.weights));
    }
    if (d.return_column_sums) {
      args_.column_sums = Tensor(nullptr, sums, {d.batch, d.num_heads, d.seqlen_k});
      append(all, count, results.make(args_.column_sums));
    }
    returned = std::move(all);
  }

  run_without_gil([&] { return forward_with_workspace(plan, args_); });
  return returned;
}

}  // namespace polyhead::python
