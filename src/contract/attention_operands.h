// The tensors of a call of attention, one row each. Who needs to know them asks here: the checks of a call, a layer's,
// the fronts that allocate results.
#pragma once

#include <span>
#include <vector>

#include "contract/operands.h"
#include "core/memory_size.h"
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
  size_t capture = 0;                                // or, where both are null, here among the captures,
  bool grad_capture = false;                         // or among their gradients

  const Tensor& of(const ForwardArgs& args) const {
    return in_forward != nullptr ? args.*in_forward : element(args.captures);
  }
  const Tensor& of(const BackwardArgs& args) const {
    if (in_forward != nullptr) return args.forward.*in_forward;
    if (in_backward != nullptr) return args.*in_backward;
    return element(grad_capture ? args.grad_captures : args.forward.captures);
  }

 private:
  // Not given, where there are fewer.
  const Tensor& element(std::span<const Tensor> captures) const;
};

// Those that every desc may ask for, in the order in which they are checked: what is written comes last.
std::span<const AttentionOperand> attention_operands();

const AttentionOperand& attention_operand(Tensor ForwardArgs::*tensor);

MemorySize num_elements(const CaptureShape& shape);

// A tensor of the calls of one plan: its shape is asked for when the plan is made, a call compares.
struct PlannedOperand {
  AttentionOperand row;
  OperandShape shape;  // no dims: a call must not give it

  PlannedOperand(const AttentionOperand& of, const OperandShape& has) : row(of), shape(has) {}
};

// In the order of the table: what desc.program captures before what is written, the gradients of that behind all.
std::vector<PlannedOperand> planned_operands(const AttentionDesc& desc);

}  // namespace polyhead
