// What a backward makes of the gradient of the softmax's input, number by number: the product's scores and the tensors of a
// score program have gradients that are told by the numbers that nodes give, for the forward's give the derivatives.
#pragma once

#include <optional>
#include <vector>

#include "graph/match.h"

namespace polyhead::graph {

// For a capture of match.program: `times` the gradient of the softmax's input by the derivative, before any sum.
struct CaptureGradient {
  int value = kNone;
  size_t capture = 0;
  double times = 1;
};

struct Slopes {
  std::vector<int> nodes = {};  // that compute what was told, the forward's and those that the flow knows left out
  std::vector<CaptureGradient> captures = {};
  std::optional<double> inverse = {};  // of the slope, where that is one number
};

// Tells `flow`, which knows the gradient of the softmax's input, what is that of the product's scores.
Slopes tell_slopes(const Net& net, const Match& match, Flow& flow);

}  // namespace polyhead::graph
