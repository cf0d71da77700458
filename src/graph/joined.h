// Decoders that multiply with the keys and values of earlier runs and with new ones apart: Concat of two products' scores, and
// the sum of two products with parts of the weights. Either is one product with what is joined, so that a cache is found in it.
#pragma once

#include <string>
#include <vector>

#include "graph/net.h"
#include "graph/rewrite.h"

namespace polyhead::graph {

// What one product stands in the place of, until it is known whether that is fused.
struct Joined {
  std::vector<Node> before;        // both parts; the last one is where they met
  std::vector<std::string> added;  // outputs of the nodes that make the product, its own the last
};

// All of them in `graph`, whose net this was: it needs another one, if there are any.
std::vector<Joined> join_products(const Net& net, Graph& graph, Names& names);

// Puts back what no operator has replaced; of the others, what was made for them alone goes away.
void part_products(Graph& graph, const std::vector<Joined>& joined);

// Why a Concat of scores is none of two products with the same query; "" if it is, or if no two products are joined.
std::string why_not_joined(const Net& net, int concat);

}  // namespace polyhead::graph
