// The tensors of a call of attention, one row each. Who needs to know them asks here: the checks of a call, a layer's,
// the fronts that allocate results.
#pragma once

#include <span>
#include <vector>

#include "contract/operands.h"
#include "polyhead/attention.h"

namespace polyhead {

// What a tensor is to one direction.
enum class Use : uint8_t {
  kNone,
  kInput,
  kOptionalInput,
  kOutput,
  kOptionalOutput,
  kGradient,  // optional too
};

struct AttentionOperand {
  const char* name;
  Tensor ForwardArgs::*in_forward;    // where it stands among the arguments: here,
  Tensor BackwardArgs::*in_backward;  // or, where that is null, here
  Use forward, backward;
  OperandShape (*shape)(const AttentionDesc& desc);  // no dims: the desc does not ask for it

  const Tensor& of(const ForwardArgs& args) const { return args.*in_forward; }
  const Tensor& of(const BackwardArgs& args) const {
    return in_forward != nullptr ? args.forward.*in_forward : args.*in_backward;
  }
};

// In the order in which they are checked: what is written comes last.
std::span<const AttentionOperand> attention_operands();

const AttentionOperand& attention_operand(Tensor ForwardArgs::*tensor);

// A tensor of the calls of one plan: its shape is asked for when the plan is made, a call compares.
struct PlannedOperand {
  AttentionOperand row;
  OperandShape shape;  // no dims: a call must not give it

  PlannedOperand(const AttentionOperand& of, const AttentionDesc& desc) : row(of), shape(of.shape(desc)) {}
};

// In the order of the table.
std::vector<PlannedOperand> planned_operands(const AttentionDesc& desc);

}  // namespace polyhead
