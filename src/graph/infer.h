// Shapes, small integers and uniform numbers, node by node.
#pragma once

#include <vector>

#include "graph/net.h"

namespace polyhead::graph {

// Of the outputs of a node, whose inputs' facts are known.
void infer(const Net& net, int node, std::vector<Facts>& results);

// The node's numbers, where they follow from those of its inputs: `results` have their shapes.
void infer_numbers(const Net& net, int node, Facts& result);

Facts facts_of(const Constant& constant);

// Adds what the model itself says of a value.
void add_told(Symbols& symbols, const ValueInfo& told, Facts& facts);

}  // namespace polyhead::graph
