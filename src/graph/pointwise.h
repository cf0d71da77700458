// Nodes that give numbers by numbers, computed with numbers of our own: what a piece of a graph does is told by these.
#pragma once

#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include "graph/net.h"

namespace polyhead::graph {

// A number with its derivatives by some others.
struct Dual {
  static constexpr size_t kMost = 9;
  double value = 0;
  std::array<double, kMost> slopes = {};
};

double gelu(double x);
double gelu_tanh(double x);

// What the node's output is of numbers in the places of its inputs, none for those that are left out; booleans are 0 and 1.
// Nothing where it does more than that, or is not known.
std::optional<Dual> pointwise(const Net& net, int node, const std::vector<std::optional<Dual>>& operands);

}  // namespace polyhead::graph
