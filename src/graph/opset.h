// A model's ONNX operators, said in a newer opset.
#pragma once

#include <string>

#include "graph/net.h"
#include "graph/rewrite.h"

namespace polyhead::graph {

// Why the nodes of a graph, its bodies left aside, cannot keep their meaning in opset `to`: of the first that cannot; ""
// if all can.
std::string why_not_raised(const Net& net, int64_t to);

// Says them so. `graph` is the net's own; tensors that nodes now read become its initializers.
void raise_nodes(Model& model, Graph& graph, const Net& net, int64_t to, Names& names);

}  // namespace polyhead::graph
