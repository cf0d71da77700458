// What a layer should give, by the plain loops of testing/layer_truth.h, which share no code with src/layer.
#pragma once

#include <array>

#include "layer_problem.h"

namespace polyhead::testing {

// Results of forward and backward, [batch, beam, time, vector]. Where inputs are one tensor, their gradients are one
// too: that of the first.
struct LayerResults {
  Array out, attn_weights;
  std::array<Array, 3> grad_inputs;  // query, key, value
  Array grad_attn_bias, grad_alibi_slopes, grad_sink_logits;
  std::array<Array, kNumWeightKinds> grad_weights;
  std::vector<std::string> faults;
};

struct NamedResult {
  const char* name;
  const Array* array;
};
std::vector<NamedResult> named(const LayerResults& results);

struct ExpectedLayer {
  LayerResults exact;      // float64 arithmetic (long double with float64 inputs), float64 results
  LayerResults naive;      // float32 arithmetic (float64 with float64 inputs); what is stored on the way is rounded
  LayerResults magnitude;  // for each element the sum of the absolute values of its terms
};
ExpectedLayer expected(const LayerProblem& problem, const LayerInputs& in);

}  // namespace polyhead::testing
