// Integers that grow evenly along the dims of their tensor: what Range gives, and what is made of it.
#pragma once

#include <optional>
#include <vector>

#include "graph/net.h"

namespace polyhead::graph {

// The element at [i0, i1, ...] is offset + steps[0] * i0 + steps[1] * i1 + ...
struct Affine {
  Size offset = {0, {}};
  std::vector<int64_t> steps = {};
};

std::optional<Affine> affine_of(const Net& net, int value);

// Of a Slice with steps of 1: where it begins in each dim of its input.
std::optional<Sizes> slice_starts(const Net& net, int node);

}  // namespace polyhead::graph
