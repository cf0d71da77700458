#include "attention/checks.h"
#include "attention/checks_operands.h"
#include "core/sentence.h"

namespace polyhead {
namespace {

// What forward wrote is an input here, as are the gradients that come in.
Status add_saved(const BackwardArgs& args, Operands& operands) {
  const ForwardArgs& forward = args.forward;
  for (const Tensor* returned : {&forward.weights, &forward.column_sums}) {
    if (!returned->given()) continue;
    const char* name = returned == &forward.weights ? "weights" : "column_sums";
    return invalid(sentence(name, " is given to backward, but has no gradient: leave it out"));
  }
  if (!forward.out.given() && !args.delta.given()) {
    return invalid("out is missing: backward needs what forward wrote, or delta in its place");
  }
  if (!forward.logsumexp.given()) return invalid("logsumexp is missing: backward needs what forward wrote");
  Status status;
  if (forward.out.given()) status = operands.add_out_like(Role::kInput, "out", forward.out);
  if (status.ok()) status = operands.add_logsumexp_like(Role::kInput, "logsumexp", forward.logsumexp);
  if (status.ok()) status = operands.add_out_like(Role::kInput, "grad_out", args.grad_out);
  if (status.ok() && args.grad_logsumexp.given()) {
    status = operands.add_logsumexp_like(Role::kInput, "grad_logsumexp", args.grad_logsumexp);
  }
  if (status.ok() && args.delta.given()) status = operands.add_logsumexp_like(Role::kInput, "delta", args.delta);
  return status;
}

Status without(const char* name, const char* option) {
  return invalid(sentence(name, " is given, but the plan was made without ", option));
}

Status add_gradients(const AttentionDesc& desc, const BackwardArgs& args, Operands& operands) {
  const Tensor &query = args.grad_query, &key = args.grad_key, &value = args.grad_value;
  const Tensor &bias = args.grad_attn_bias, &slopes = args.grad_alibi_slopes;
  if (!query.given() && !key.given() && !value.given() && !bias.given() && !slopes.given()) {
    return invalid(
        "no gradient is asked for: give grad_query, grad_key, grad_value, grad_attn_bias or grad_alibi_slopes");
  }
  if (bias.given() && !desc.attn_bias.given) return without("grad_attn_bias", "attn_bias");
  if (slopes.given() && desc.alibi_slopes_ndim == 0) return without("grad_alibi_slopes", "alibi_slopes");
  Status status;
  if (query.given()) status = operands.add_query_like(Role::kGradient, "grad_query", query);
  if (status.ok() && key.given()) status = operands.add_key_like(Role::kGradient, "grad_key", key);
  if (status.ok() && value.given()) status = operands.add_value_like(Role::kGradient, "grad_value", value);
  if (status.ok() && bias.given()) {
    status = operands.add_broadcast(Role::kGradient, "grad_attn_bias", bias, desc.attn_bias);
  }
  if (status.ok() && slopes.given()) status = operands.add_slopes_like(Role::kGradient, "grad_alibi_slopes", slopes);
  return status;
}

}  // namespace

Status check_backward_args(const AttentionDesc& desc, const BackwardArgs& args, size_t workspace_bytes) {
  const ForwardArgs& forward = args.forward;
  Operands operands(desc);
  Status status = operands.add_inputs(forward);
  if (status.ok()) status = add_saved(args, operands);
  if (status.ok()) status = add_gradients(desc, args, operands);
  if (status.ok()) status = operands.check_workspace(forward.workspace, forward.workspace_bytes, workspace_bytes);
  return status;
}

}  // namespace polyhead
