// The tensors of a problem's calls, for the commands that time or print what they give.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "buffer.h"
#include "problem.h"
#include "testing/call.h"

namespace polyhead::tools {

// Only what can be drawn is: an error if the operands do not fit into this machine's memory.
Status check_memory(const Problem& problem);

// A problem's operands in memory that is aligned to 64 bytes.
class Operands {
 public:
  // Draws every input that `given` does not already hold, whose memory must outlive the result.
  static Result<Operands> create(const Problem& problem, const ForwardArgs& given = {});

  const AttentionDesc& desc() const { return desc_; }  // to plan with

  // Inputs and outputs of a forward call, every element of the outputs NaN; without workspace.
  const ForwardArgs& forward() const { return forward_; }

  // Those of a backward call on what forward() wrote. `given`: grad_out and grad_logsumexp, if they are not to be drawn;
  // with a given grad_out there is no grad_logsumexp but a given one.
  Result<BackwardArgs> backward(const Problem& problem, const BackwardArgs& given = {});

 private:
  AttentionDesc desc_;
  BackwardInputs in_;
  std::unique_ptr<PlacedInputs> placed_;
  std::unique_ptr<PlacedOutputs> outputs_;
  std::unique_ptr<PlacedGradients> gradients_;
  std::vector<Tensor> captures_;  // of the program
  ForwardArgs forward_;
};

// A scratch buffer for args, of plan.workspace_bytes().
Result<Buffer> give_workspace(size_t size_bytes, ForwardArgs& args);

// (query, key) pairs of all sequences and query heads that lengths, causal and window leave visible.
double visible_pairs(const AttentionDesc& desc, const ForwardArgs& args);

// Operations of the products that `needs` takes: of 5, those for S, dP, dQ, dK and dV.
double backward_flops(const AttentionDesc& desc, GradientSet needs, double visible_pairs);

// Bytes of all elements of the tensors given in `args`, inputs and outputs.
double traffic_bytes(const ForwardArgs& args);
double traffic_bytes(const BackwardArgs& args);

}  // namespace polyhead::tools
