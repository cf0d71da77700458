// The same training step with polyhead's attention and with unfused attention beside it.
#pragma once

#include "model.h"
#include "text.h"

namespace polyhead::demo {

struct StepCost {
  double seconds = 0;          // forward and backward of a batch: the median of the rounds
  size_t memory_bytes = 0;     // all that the step holds: parameters, gradients, moments, activations, workspace
  size_t attention_bytes = 0;  // of it what attention keeps and works in
};

struct Comparison {
  StepCost fused, unfused;
  double loss_difference = 0;
  double gradient_difference = 0;  // the largest, as a share of the largest gradient
};

/// Both on one batch and the same parameters, in turn, at least three rounds and about `seconds` long.
Result<Comparison> compare_attention(const ModelDesc& desc, const Parameters& parameters,
                                     const ModelParameters& weights, const Batch& batch, double seconds);

}  // namespace polyhead::demo
