#include "attention/checks.h"
#include "contract/attention_operands.h"
#include "core/dropout.h"
#include "core/sentence.h"

namespace polyhead {
namespace {

Role role_of(Use use) {
  if (use == Use::kGradient) return Role::kGradient;
  return use == Use::kOutput || use == Use::kOptionalOutput ? Role::kOutput : Role::kInput;
}

// One row of the table, for the direction that takes `args`.
template <class Args>
Status add_operand(const AttentionDesc& desc, const AttentionOperand& row, Use use, const Args& args,
                   Operands& operands) {
  const Tensor& t = row.of(args);
  const bool optional = use == Use::kOptionalInput || use == Use::kOptionalOutput || use == Use::kGradient;
  if (optional && !t.given()) return {};
  const OperandShape shape = row.shape(desc);
  if (shape.ndim == 0) {
    if (!t.given()) return {};
    if (use != Use::kGradient) return unasked(row.name, t);
    constexpr size_t kPrefix = sizeof "grad_" - 1;
    return invalid(sentence(row.name, " is given, but the plan was made without ", row.name + kPrefix));
  }
  return operands.add(role_of(use), row.name, t, shape);
}

Status nothing_asked() {
  std::string names;
  for (const AttentionOperand& row : attention_operands()) {
    if (row.backward != Use::kGradient) continue;
    const bool last = &row == &attention_operands().back();
    names += sentence(names.empty() ? "" : last ? " or " : ", ", row.name);
  }
  return invalid("no gradient is asked for: give " + names);
}

Status check_saved(const ForwardArgs& forward, const Tensor& delta) {
  if (!forward.out.given() && !delta.given()) {
    return invalid("out is missing: backward needs what forward wrote, or delta in its place");
  }
  if (!forward.logsumexp.given()) return invalid("logsumexp is missing: backward needs what forward wrote");
  return {};
}

}  // namespace

Status check_forward_args(const AttentionDesc& desc, const ForwardArgs& args, size_t workspace_bytes, Device device) {
  if (Status status = check_dropout_seed("dropout", desc.dropout_p, args.dropout_seed); !status.ok()) return status;
  Operands operands(device);
  for (const AttentionOperand& row : attention_operands()) {
    if (row.forward == Use::kNone) continue;
    if (Status status = add_operand(desc, row, row.forward, args, operands); !status.ok()) return status;
  }
  return operands.check_workspace(args.workspace, args.workspace_bytes, workspace_bytes);
}

Status check_backward_args(const AttentionDesc& desc, const BackwardArgs& args, size_t workspace_bytes, Device device) {
  const ForwardArgs& forward = args.forward;
  Operands operands(device);
  if (Status status = check_dropout_seed("dropout", desc.dropout_p, forward.dropout_seed); !status.ok()) return status;
  if (Status status = check_saved(forward, args.delta); !status.ok()) return status;
  bool asked = false;
  for (const AttentionOperand& row : attention_operands()) {
    if (row.backward == Use::kNone) {
      if (!row.of(args).given()) continue;
      return invalid(sentence(row.name, " is given to backward, but has no gradient: leave it out"));
    }
    if (Status status = add_operand(desc, row, row.backward, args, operands); !status.ok()) return status;
    asked = asked || (row.backward == Use::kGradient && row.of(args).given());
  }
  if (!asked) return nothing_asked();
  return operands.check_workspace(forward.workspace, forward.workspace_bytes, workspace_bytes);
}

}  // namespace polyhead
