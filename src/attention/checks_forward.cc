#include "attention/checks.h"
#include "attention/checks_operands.h"

namespace polyhead {
namespace {

Status check_outputs(const AttentionDesc& desc, const ForwardArgs& args, Operands& operands) {
  const Dim batch{"batch", desc.batch}, num_heads{"num_heads", desc.num_heads};
  const Dim seqlen_q{"seqlen_q", desc.seqlen_q}, seqlen_k{"seqlen_k", desc.seqlen_k};
  Status status = operands.add_out_like(Role::kOutput, "out", args.out);
  if (status.ok() && args.logsumexp.given()) {
    status = operands.add_logsumexp_like(Role::kOutput, "logsumexp", args.logsumexp);
  }
  if (!status.ok()) return status;
  switch (desc.return_weights) {
    case ReturnWeights::kNone: status = unasked("weights", args.weights); break;
    case ReturnWeights::kPerHead:
      status = operands.add(Role::kOutput, "weights", args.weights, desc.dtype, {batch, num_heads, seqlen_q, seqlen_k});
      break;
    case ReturnWeights::kMean:
      status = operands.add(Role::kOutput, "weights", args.weights, desc.dtype, {batch, seqlen_q, seqlen_k});
      break;
  }
  if (!status.ok()) return status;
  if (!desc.return_column_sums) return unasked("column_sums", args.column_sums);
  return operands.add(Role::kOutput, "column_sums", args.column_sums, sums_dtype(desc), {batch, num_heads, seqlen_k});
}

}  // namespace

Status check_forward_args(const AttentionDesc& desc, const ForwardArgs& args, size_t workspace_bytes) {
  Operands operands(desc);
  Status status = operands.add_inputs(args);
  if (status.ok()) status = check_outputs(desc, args, operands);
  if (status.ok()) status = operands.check_workspace(args.workspace, args.workspace_bytes, workspace_bytes);
  return status;
}

}  // namespace polyhead
