#include "attention/checks.h"
#include "core/dropout.h"
#include "core/dtype.h"
#include "core/sentence.h"

namespace polyhead {
namespace {

Role role_of(Use use) {
  if (use == Use::kGradient) return Role::kGradient;
  return use == Use::kOutput || use == Use::kOptionalOutput ? Role::kOutput : Role::kInput;
}

bool is_optional(Use use) { return use == Use::kOptionalInput || use == Use::kOptionalOutput || use == Use::kGradient; }

// One operand, for the direction that uses it so. Most are not given: they cost a comparison.
inline Status add_operand(const PlannedOperand& planned, Use use, const Tensor& t, Operands& operands) {
  const char* const name = planned.row.name;
  const bool asked = planned.shape.ndim > 0;
  if (!t.given() && (!asked || is_optional(use))) return {};
  if (asked) return operands.add(role_of(use), name, t, planned.shape);
  if (use != Use::kGradient) return unasked(name, t);
  if (planned.row.grad_capture) return invalid(sentence(name, " is given, but that capture holds no floats"));
  constexpr size_t kPrefix = sizeof "grad_" - 1;
  return invalid(sentence(name, " is given, but the plan was made without ", name + kPrefix));
}

// One more than the desc has asked for has no row that would refuse it.
Status check_count(const AttentionDesc& desc, const char* name, std::span<const Tensor> captures) {
  if (captures.empty()) return {};
  if (desc.program == nullptr) return invalid(sentence(name, " are given, but the plan was made without a program"));
  const size_t asked = desc.captures.size();
  if (captures.size() <= asked) return {};
  return invalid(sentence(name, " has ", captures.size(), " tensors, the program captures ", asked));
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

Status without_softmax(const char* name, const Tensor& t) {
  if (!t.given()) return {};
  return invalid(sentence(name, " is given, but normalizer is none: there is no logsumexp"));
}

// Without a softmax backward needs nothing of what forward wrote.
Status check_saved(const AttentionDesc& desc, const BackwardArgs& args) {
  const ForwardArgs& forward = args.forward;
  const Tensor& delta = args.delta;
  if (desc.normalizer == Normalizer::kNone) {
    Status status = without_softmax("logsumexp", forward.logsumexp);
    if (status.ok()) status = without_softmax("grad_logsumexp", args.grad_logsumexp);
    return status.ok() ? without_softmax("delta", delta) : status;
  }
  if (!forward.out.given() && !delta.given()) {
    return invalid("out is missing: backward needs what forward wrote, or delta in its place");
  }
  if (!forward.logsumexp.given()) return invalid("logsumexp is missing: backward needs what forward wrote");
  return {};
}

}  // namespace

Status check_forward_args(const AttentionDesc& desc, std::span<const PlannedOperand> planned, const ForwardArgs& args,
                          size_t workspace_bytes, Device device) {
  if (Status status = check_dropout_seed("dropout", desc.dropout_p, args.dropout_seed); !status.ok()) return status;
  if (Status status = check_count(desc, "captures", args.captures); !status.ok()) return status;
  if (desc.normalizer == Normalizer::kNone) {
    if (Status status = without_softmax("logsumexp", args.logsumexp); !status.ok()) return status;
  }
  Operands operands(device);
  for (const PlannedOperand& operand : planned) {
    const AttentionOperand& row = operand.row;
    if (row.forward == Use::kNone) continue;  // backward's alone
    if (Status status = add_operand(operand, row.forward, row.of(args), operands); !status.ok()) return status;
  }
  return operands.check_workspace(args.workspace, args.workspace_bytes, workspace_bytes);
}

Status check_backward_args(const AttentionDesc& desc, std::span<const PlannedOperand> planned, const BackwardArgs& args,
                           size_t workspace_bytes, Device device) {
  const ForwardArgs& forward = args.forward;
  if (desc.page_size > 0) {
    return {StatusCode::kUnsupported,
            "page_table: backward does not take paged keys, give key and value without pages"};
  }
  for (const auto& [name, dtype] : {std::pair{"key", key_dtype(desc)}, std::pair{"value", value_dtype(desc)}}) {
    if (!has_scales(dtype)) continue;
    return {StatusCode::kUnsupported,
            sentence(name, " is ", dtype_name(dtype), ": backward takes query, key and value of one dtype")};
  }
  Operands operands(device);
  if (Status status = check_dropout_seed("dropout", desc.dropout_p, forward.dropout_seed); !status.ok()) return status;
  if (Status status = check_count(desc, "captures", forward.captures); !status.ok()) return status;
  if (Status status = check_count(desc, "grad_captures", args.grad_captures); !status.ok()) return status;
  if (Status status = check_saved(desc, args); !status.ok()) return status;
  bool asked = false;
  for (const PlannedOperand& operand : planned) {
    const Use use = operand.row.backward;
    const Tensor& t = operand.row.of(args);
    if (use == Use::kNone) {
      if (!t.given()) continue;
      return invalid(sentence(operand.row.name, " is given to backward, but has no gradient: leave it out"));
    }
    if (Status status = add_operand(operand, use, t, operands); !status.ok()) return status;
    asked = asked || (use == Use::kGradient && t.given());
  }
  if (!asked) return nothing_asked();
  return operands.check_workspace(forward.workspace, forward.workspace_bytes, workspace_bytes);
}

}  // namespace polyhead
