#include "graph/sinks.h"

#include <algorithm>

#include "graph/affine.h"
#include "graph/nodes.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

bool passes(const Net& net, int node) {
  return net.is(node, "Identity") || (net.is(node, "Cast") && is_float(net.facts(net.output(node, 0)).type));
}

// The node behind a value that is read once, past those that change nothing.
int only_reader(const Net& net, int id) {
  while (true) {
    const NetValue& value = net.value(id);
    if (value.is_output || value.users.size() != 1) return kNone;
    const int node = value.users.front();
    if (!passes(net, node)) return node;
    id = net.output(node, 0);
  }
}

int joined_by(const Net& net, int id) {
  int node = net.producer(id);
  while (passes(net, node)) node = net.producer(net.input(node, 0));
  const bool joins = net.is(node, "Concat") && net.node(node).inputs.size() == 2;
  const int64_t axis = joins ? integer_of(net.node(node), "axis", 0) : 0;
  return joins && (axis == -1 || axis == net.rank(net.output(node, 0)) - 1) ? node : kNone;
}

// The dims of the heads: the one ahead of rows and keys, and of scores [batch, heads, repeats, q, k] the one before it.
bool is_of_heads(size_t dim, size_t rank) { return dim + 3 == rank || (rank == 5 && dim == 1); }

}  // namespace

std::optional<Sinks> sinks_of(const Net& net, int input, int output) {
  const int joins = joined_by(net, input), cuts = only_reader(net, output);
  if (joins == kNone || !net.is(cuts, "Slice")) return std::nullopt;
  const auto starts = slice_starts(net, cuts);
  if (!starts || starts->empty() || !(starts->back().is(0) || starts->back().is(1))) return std::nullopt;
  const size_t side = starts->back().is(0) ? 0 : 1;
  Sinks sinks = {net.input(joins, side), net.output(cuts, 0), net.input(joins, 1 - side)};
  const auto scores = net.shape(sinks.scores), weights = net.shape(sinks.weights), logits = net.shape(sinks.logits);
  if (scores.size() < 4 || !std::equal(scores.begin(), scores.end(), weights.begin(), weights.end()) ||
      logits.size() != scores.size() || !logits.back().is(1))
    return std::nullopt;
  while (net.is(net.producer(sinks.logits), "Expand") || net.is(net.producer(sinks.logits), "Identity"))
    sinks.logits = net.input(net.producer(sinks.logits), 0);
  return sinks;
}

bool are_of_heads(const Net& net, const Sinks& sinks) {
  const auto shape = net.shape(sinks.logits), scores = net.shape(sinks.scores);
  if (shape.empty() || shape.size() > scores.size()) return false;
  Size count;
  Size heads;
  for (size_t i = 0; i < scores.size(); ++i) {
    const size_t missing = scores.size() - shape.size();
    const Size size = i < missing ? Size{} : shape[i - missing];
    if (!is_of_heads(i, scores.size()) && !size.is(1)) return false;
    count = net.symbols().product(count, size);
    if (is_of_heads(i, scores.size())) heads = net.symbols().product(heads, scores[i]);
  }
  return count == heads;
}

std::optional<std::vector<double>> constant_logits(const Net& net, const Sinks& sinks) {
  constexpr size_t kMostNumbers = 1 << 22;
  const Constant* constant = net.facts(sinks.logits).constant;
  const auto scores = net.shape(sinks.scores);
  if (constant == nullptr || constant->dims.size() != scores.size()) return std::nullopt;
  const auto numbers = numbers_of(*constant, kMostNumbers);
  if (!numbers || numbers->empty()) return std::nullopt;
  std::vector<double> logits;
  std::vector<int64_t> strides(scores.size());  // of a logit among those of all heads; 0: alike
  int64_t count = 1;
  for (size_t i = scores.size(); i-- > 0;) {
    if (!is_of_heads(i, scores.size())) continue;
    if (!scores[i].is(constant->dims[i])) return std::nullopt;
    strides[i] = count;
    count *= constant->dims[i];
  }
  logits.resize(static_cast<size_t>(count));
  std::vector<bool> is_told(logits.size());
  for (size_t at = 0; at < numbers->size(); ++at) {
    int64_t head = 0, rest = static_cast<int64_t>(at);
    for (size_t i = scores.size(); i-- > 0; rest /= constant->dims[i]) head += rest % constant->dims[i] * strides[i];
    const auto place = static_cast<size_t>(head);
    if (is_told[place] && logits[place] != (*numbers)[at]) return std::nullopt;
    logits[place] = (*numbers)[at];
    is_told[place] = true;
  }
  return logits;
}

}  // namespace polyhead::graph
