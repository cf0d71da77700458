// MatMul and its relatives, as products of labelled dims: MatMul of stacks is "abik,abkj->abij".
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "graph/net.h"

namespace polyhead::graph {

// A value whose dims are told in another order than it has: dim i of what is meant is its dim order[i].
struct Operand {
  int value = kNone;
  std::vector<size_t> order = {};

  size_t rank() const { return order.size(); }
};

struct Product {
  int node = kNone;
  Operand left, right;           // [lead..., rows, inner] and [lead..., columns, inner]
  std::vector<size_t> out = {};  // dim i of the result is dim out[i] of [lead..., rows, columns]
  double factor = 1;
};

bool is_product(const Net& net, int node);

// Nodes of quantised models that compute with integers, or make them or floats of the other: results are rounded.
bool rounds(const Net& net, int node);

// Those of them that are products of matrices.
bool is_rounded_product(const Net& net, int node);

// The place of the second operand: QLinearMatMul and its like have a scale and a zero point behind the first.
size_t second_operand(const Net& net, int node);

// A product of floats or integers whose operands have as many dims, or perhaps: a projection's weight has fewer.
bool multiplies_stacks(const Net& net, int node);

// The scores of queries and keys: the result's last two dims are rows and columns. `reason` where it is something else.
std::optional<Product> scores_product(const Net& net, int node, std::string& reason);

// The weights, a value [lead..., rows, inner], times values; here `right` is [lead..., inner, columns]. With `sums_rows`
// they are [lead..., inner, rows].
std::optional<Product> weights_product(const Net& net, int node, int weights, std::string& reason,
                                       bool sums_rows = false);

}  // namespace polyhead::graph
