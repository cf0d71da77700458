// A product with a constant matrix, and what is done to its result at once:
//   sum = activation(x w + bias) + residual      out = norm(sum)
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "graph/rewrite.h"

namespace polyhead::graph {

struct Linear {
  std::vector<int> nodes;           // that the operator replaces
  int x = kNone;                    // [rows..., k]
  int weight = kNone;               // [k, n]
  bool transposed = false;          // it is [n, k]
  int bias = kNone;                 // n numbers
  std::string activation = {};      // "": none
  int residual = kNone;             // as out
  std::string norm = {};            // "": none
  int gamma = kNone, beta = kNone;  // n numbers each
  double epsilon = 0;               // of the norm
  int out = kNone, sum = kNone;     // [rows..., n]; the latter where there is a norm and others read what it is of
  std::vector<std::string> words = {};
  std::string reason = {};  // why it stays
};

// The one that begins at a node; nothing where that is no product with a constant matrix. A value that `stays` is no part of
// it, but its result.
std::optional<Linear> linear_at(const Net& net, int node, const std::function<bool(int value)>& stays);

// polyhead.Linear in its place.
Rewrite rewrite(const Emission& emission, const Linear& linear);

}  // namespace polyhead::graph
