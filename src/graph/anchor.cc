// Softmax and its decompositions.
#include <algorithm>
#include <span>

#include "core/sentence.h"
#include "graph/match.h"

namespace polyhead::graph {
namespace {

// Whether a node reduces over the last dim alone, and keeps it.
bool reduces_last(const Net& net, int node, std::string_view op_type) {
  if (!net.is(node, op_type) || integer_of(net.node(node), "keepdims", 1) == 0) return false;
  const auto axes = axes_of(net, node);
  const int rank = net.rank(net.input(node, 0));
  return axes && axes->size() == 1 && (axes->front() == -1 || (rank > 0 && axes->front() == rank - 1));
}

Anchor softmax(const Net& net, int node) {
  Anchor anchor = {node, net.input(node, 0), net.output(node, 0), {node}, "", ""};
  const int rank = net.rank(anchor.input);
  const int64_t axis = integer_of(net.node(node), "axis", net.opset() < 13 ? 1 : -1);
  const bool last = axis == rank - 1 || (axis == -1 && (net.opset() >= 13 || rank > 0));
  if (!last) {
    anchor.reason = rank < 0
                        ? sentence("the number of dims of the scores of ", words_of(net, node), " is not known")
                        : sentence(words_of(net, node), " runs over axis ", axis, " of ", rank, ", not over the keys");
  }
  return anchor;
}

// Whether a value has `shape` less its last dim, or a dim of any size in the place of that.
bool has_rows_of(std::span<const Size> value, std::span<const Size> shape) {
  const bool keeps_last = value.size() == shape.size();
  return !shape.empty() && value.size() + 1 >= shape.size() && value.size() <= shape.size() &&
         std::equal(shape.begin(), shape.end() - 1, value.begin(), value.end() - (keeps_last ? 1 : 0));
}

// Whether a value is a reduction of the rows of x, repeated along them or not. The nodes that make it are added.
bool is_reduction(const Net& net, int id, int x, std::string_view op_type, std::vector<int>& nodes) {
  int node = net.producer(id);
  const auto shape = net.shape(x);
  bool moved = false;
  while (node != kNone) {
    nodes.push_back(node);
    if (net.is(node, op_type) && net.input(node, 0) == x) break;
    size_t from = 0;
    if (net.is(node, "Max") && net.node(node).inputs.size() == 2) {  // JAX: at least -inf
      const bool first = net.number(net.input(node, 0)).has_value();
      const auto least = net.number(net.input(node, first ? 0 : 1));
      if (!least || *least > -1e30) return false;
      from = first ? 1 : 0;
    } else if (net.is(node, "Reshape") || net.is(node, "Unsqueeze") || net.is(node, "Expand")) {
      moved = true;
      if (!has_rows_of(net.shape(net.input(node, 0)), shape)) return false;
    } else if (!net.is(node, "Identity")) {
      return false;
    }
    node = net.producer(net.input(node, from));
  }
  if (node == kNone) return false;
  if (!moved) return reduces_last(net, node, op_type);
  const auto axes = axes_of(net, node);
  const auto last = static_cast<int64_t>(shape.size()) - 1;
  return axes && axes->size() == 1 && (axes->front() == -1 || axes->front() == last) &&
         net.rank(id) == static_cast<int>(shape.size()) && has_rows_of(net.shape(id), shape);
}

// x of x - max(x), the nodes added; x itself where nothing is subtracted.
int without_maximum(const Net& net, int id, std::vector<int>& nodes) {
  const int sub = net.producer(id);
  if (!net.is(sub, "Sub")) return id;
  std::vector<int> seen = {sub};
  if (!is_reduction(net, net.input(sub, 1), net.input(sub, 0), "ReduceMax", seen)) return id;
  nodes.insert(nodes.end(), seen.begin(), seen.end());
  return net.input(sub, 0);
}

// exp(x) / sum(exp(x)), with the maximum taken off or not.
std::optional<Anchor> quotient(const Net& net, int node) {
  int sum = kNone, exp = kNone;
  std::vector<int> nodes = {node};
  if (net.is(node, "Div")) {
    exp = net.producer(net.input(node, 0));
    sum = net.input(node, 1);
  } else {
    for (size_t i = 0; i < 2; ++i) {
      const int reciprocal = net.producer(net.input(node, i));
      if (!net.is(reciprocal, "Reciprocal")) continue;
      nodes.push_back(reciprocal);
      sum = net.input(reciprocal, 0);
      exp = net.producer(net.input(node, 1 - i));
    }
  }
  if (!net.is(exp, "Exp") || !is_reduction(net, sum, net.output(exp, 0), "ReduceSum", nodes)) return std::nullopt;
  nodes.push_back(exp);
  const int input = without_maximum(net, net.input(exp, 0), nodes);
  return Anchor{node, input, net.output(node, 0), nodes, "softmax by Exp and ReduceSum", "", net.output(exp, 0)};
}

// exp(log_softmax(x)), or exp(x - logsumexp(x)).
std::optional<Anchor> exponential(const Net& net, int node) {
  const int before = net.producer(net.input(node, 0));
  if (net.is(before, "LogSoftmax")) {
    Anchor anchor = softmax(net, before);
    anchor.nodes.push_back(node);
    anchor.node = node;
    anchor.output = net.output(node, 0);
    anchor.words = "softmax by LogSoftmax";
    return anchor;
  }
  if (!net.is(before, "Sub")) return std::nullopt;
  const int reduced = net.producer(net.input(before, 1));
  if (!reduces_last(net, reduced, "ReduceLogSumExp") || net.input(reduced, 0) != net.input(before, 0))
    return std::nullopt;
  return Anchor{node, net.input(before, 0), net.output(node, 0), {node, before, reduced}, "softmax by ReduceLogSumExp",
                ""};
}

}  // namespace

std::optional<Anchor> anchor_at(const Net& net, int node) {
  if (net.is(node, "Softmax")) return softmax(net, node);
  if (net.is(node, "Div") || net.is(node, "Mul")) return quotient(net, node);
  if (net.is(node, "Exp")) return exponential(net, node);
  return std::nullopt;
}

}  // namespace polyhead::graph
