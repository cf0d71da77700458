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
  Results results("query", arguments_[kQuery], d.dtype);
  const auto make = [&](Tensor ForwardArgs::*tensor) {
    args_.*tensor = expected_tensor(d, tensor);
    return results.make(args_.*tensor);
  };
  nb::object returned = make(&ForwardArgs::out);
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

  run_without_gil([&] { return forward_with_workspace(plan, args_); });
  return returned;
}

}  // namespace polyhead::python
