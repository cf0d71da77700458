// Softmax and its decompositions.
#include <algorithm>

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

// x of x - max(x), the nodes added; x itself where nothing is subtracted.
int without_maximum(const Net& net, int id, std::vector<int>& nodes) {
  const int sub = net.producer(id);
  if (!net.is(sub, "Sub")) return id;
  const int x = net.input(sub, 0);
  int maximum = net.producer(net.input(sub, 1));
  std::vector<int> seen = {sub};
  if (net.is(maximum, "Max")) {  // JAX: at least -inf
    const bool first = net.number(net.input(maximum, 0)).has_value();
    const auto least = net.number(net.input(maximum, first ? 0 : 1));
    if (!least || *least > -1e30) return id;
    seen.push_back(maximum);
    maximum = net.producer(net.input(maximum, first ? 1 : 0));
  }
  if (!reduces_last(net, maximum, "ReduceMax") || net.input(maximum, 0) != x) return id;
  seen.push_back(maximum);
  nodes.insert(nodes.end(), seen.begin(), seen.end());
  return x;
}

// exp(x) / sum(exp(x)), with the maximum taken off or not.
std::optional<Anchor> quotient(const Net& net, int node) {
  int sum = kNone, exp = kNone;
  std::vector<int> nodes = {node};
  if (net.is(node, "Div")) {
    exp = net.producer(net.input(node, 0));
    sum = net.producer(net.input(node, 1));
  } else {
    for (size_t i = 0; i < 2; ++i) {
      const int reciprocal = net.producer(net.input(node, i));
      if (!net.is(reciprocal, "Reciprocal")) continue;
      nodes.push_back(reciprocal);
      sum = net.producer(net.input(reciprocal, 0));
      exp = net.producer(net.input(node, 1 - i));
    }
  }
  if (!net.is(exp, "Exp") || !reduces_last(net, sum, "ReduceSum") || net.input(sum, 0) != net.output(exp, 0)) {
    return std::nullopt;
  }
  nodes.insert(nodes.end(), {exp, sum});
  const int input = without_maximum(net, net.input(exp, 0), nodes);
  return Anchor{node, input, net.output(node, 0), nodes, "softmax by Exp and ReduceSum", ""};
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
