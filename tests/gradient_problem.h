// A backward call to test with: a problem, which of its gradients are asked for, and what comes in from behind.
#pragma once

#include <string>

#include "problem.h"

namespace polyhead::testing {

// One array for each input that has a gradient.
struct Gradients {
  Array query, key, value, attn_bias, alibi_slopes;
  std::vector<std::string> faults;  // of the call that wrote them: elements not written, gaps or inputs written
};

struct GradientName {
  const char* name;
  Array Gradients::*gradient;
  Array Inputs::*input;
  Tensor BackwardArgs::*tensor;
};
inline constexpr GradientName kGradients[] = {
    {"query", &Gradients::query, &Inputs::query, &BackwardArgs::grad_query},
    {"key", &Gradients::key, &Inputs::key, &BackwardArgs::grad_key},
    {"value", &Gradients::value, &Inputs::value, &BackwardArgs::grad_value},
    {"attn_bias", &Gradients::attn_bias, &Inputs::attn_bias, &BackwardArgs::grad_attn_bias},
    {"alibi_slopes", &Gradients::alibi_slopes, &Inputs::alibi_slopes, &BackwardArgs::grad_alibi_slopes}};
inline constexpr int kNumGradients = 5;

// A set of gradients: bit n stands for kGradients[n].
using GradientSet = unsigned;
inline constexpr GradientSet kAllGradients = (1u << kNumGradients) - 1;

struct GradientProblem {
  Problem forward;
  GradientSet asked = kAllGradients;  // those of inputs that the problem lacks mean nothing
  bool accumulate = false;
  bool grad_logsumexp = false;
  bool delta = false;              // given, and `out` is not
  unsigned repeated_grad_out = 0;  // bit n: dim n of grad_out holds one value, which the expanded layout may use
};

// `forward` with a variation of its own, as its seed tells.
GradientProblem gradient_problem(const Problem& forward);

// The inputs of one backward call, densely stored. `out` and `logsumexp` are the definition's, rounded to their dtypes.
struct BackwardInputs {
  Inputs forward;
  Array out, logsumexp, grad_out, grad_logsumexp, delta;
  bool repeated_grad_out = false;  // so that the expanded layout has strides of 0
  bool accumulate = false;
  Gradients before;  // what the gradients hold, if accumulate
};
BackwardInputs random_inputs(const GradientProblem& problem);

// Sets `out`, `logsumexp` and `delta` anew, as `forward` and `grad_out` tell.
void compute_forward(const AttentionDesc& desc, BackwardInputs& in);

// The sequences [first, last) of a problem alone.
struct BackwardSlice {
  AttentionDesc desc;
  BackwardInputs inputs;
};
BackwardSlice slice_batch(const AttentionDesc& desc, const BackwardInputs& in, int64_t first, int64_t last);

// As of the forward problem, with what is asked for.
std::string problem_line(const std::string& kernel, const GradientProblem& problem);

}  // namespace polyhead::testing
