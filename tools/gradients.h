// The tensors of a problem's backward call, drawn from its seed.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "operands.h"
#include "polyhead/attention.h"
#include "problem.h"

namespace polyhead::tools {

// What comes in from behind.
struct Incoming {
  Tensor grad_out, grad_logsumexp;  // the latter if problem.logsumexp
  std::vector<Buffer> buffers;
};

// Draws what `preset` does not already hold; preset's memory must outlive the result. With a preset grad_out there is
// no grad_logsumexp but a preset one.
Result<Incoming> random_incoming(const Problem& problem, const AttentionDesc& desc, const BackwardArgs& preset = {});

struct Gradients {
  Tensor of[kNumGradients];  // as kGradients; those that are not needed are not given
  std::vector<Buffer> buffers;

  void give_to(BackwardArgs& args) const;
};

// One for each of `needs`, with its operand's dims in the problem's layout: in the operand's dtype, or all in float64.
// Every element is NaN, or, if problem.accumulate, a random number of the operand's dtype.
Result<Gradients> new_gradients(const Problem& problem, const AttentionDesc& desc, GradientSet needs,
                                Precision precision = Precision::kOfDesc);

// The args of a backward call on what forward took and wrote; without gradients and workspace.
BackwardArgs backward_args(const ForwardArgs& forward, const Incoming& incoming, bool accumulate);

// Operations of the products that `needs` takes: of 5, those for S, dP, dQ, dK and dV.
double backward_flops(const AttentionDesc& desc, GradientSet needs, double visible_pairs);

// Bytes of all elements that a backward call takes and gives.
double traffic_bytes(const BackwardArgs& args);

}  // namespace polyhead::tools
