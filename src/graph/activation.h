// Activations, told by their numbers: whatever nodes one is written with, the function is the same.
#pragma once

#include <string>
#include <vector>

#include "graph/net.h"

namespace polyhead::graph {

struct ActivationNodes {
  std::string kind;        // as polyhead.Linear has it: "relu", "gelu", "gelu_tanh", "silu"; "": there is none
  std::vector<int> nodes;  // that it is written with
  int out = kNone;
};

// What is done to a value, number by number, up to the first value from which only one of these functions is seen.
ActivationNodes activation_of(const Net& net, int value);

}  // namespace polyhead::graph
