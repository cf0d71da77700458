#include "graph/sinks.h"

#include <algorithm>
#include <span>

#include "graph/affine.h"
#include "graph/nodes.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

bool passes(const Net& net, int node) {
  return net.is(node, "Identity") || (net.is(node, "Cast") && is_float(net.facts(net.output(node, 0)).type));
}

// The node that cuts dims like those of the scores off a value, from a place of the last one on, past those that change
// nothing.
int cut_by(const Net& net, int id, std::span<const Size> scores, int64_t from) {
  for (const int node : net.value(id).users) {
    if (passes(net, node)) {
      if (const int cut = cut_by(net, net.output(node, 0), scores, from); cut != kNone) return cut;
    }
    const auto starts = net.is(node, "Slice") ? slice_starts(net, node) : std::nullopt;
    const auto left = net.shape(net.output(node, 0));
    if (starts && !starts->empty() && starts->back().is(from) && same_shape(scores, left)) return node;
  }
  return kNone;
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
  const int joins = joined_by(net, input);
  for (size_t side = 0; joins != kNone && side < 2; ++side) {
    Sinks sinks = {net.input(joins, side), kNone, net.output(joins, 0), net.input(joins, 1 - side), side == 1};
    const auto scores = net.shape(sinks.scores), logits = net.shape(sinks.logits);
    if (scores.size() < 4 || logits.size() != scores.size() || !logits.back().is(1)) continue;
    const int cuts = cut_by(net, output, scores, static_cast<int64_t>(side));
    if (cuts == kNone) continue;
    sinks.weights = net.output(cuts, 0);
    while (net.is(net.producer(sinks.logits), "Expand") || net.is(net.producer(sinks.logits), "Identity"))
      sinks.logits = net.input(net.producer(sinks.logits), 0);
    return sinks;
  }
  return std::nullopt;
}

std::optional<Padded> padded_by(const Net& net, int node, const Sinks& sinks) {
  const auto scores = net.shape(sinks.scores), joined = net.shape(sinks.joined);
  const auto has_dims = [&](int id, std::span<const Size> dims, bool keys_first) {
    Sizes wanted(dims.begin(), dims.end());
    if (keys_first) std::swap(wanted.front(), wanted.back());
    const auto shape = net.shape(id);
    return same_shape(shape, wanted);
  };
  const auto is_zero = [&](int id) { return net.number(id) == 0.0; };
  Padded padded;
  bool is_padding = false;
  if (net.is(node, "Concat")) {
    const size_t side = sinks.is_ahead ? 1 : 0;
    padded.value = net.input(node, side);
    is_padding = joined_by(net, net.output(node, 0)) == node && is_zero(net.input(node, 1 - side));
  } else if (net.is(node, "Pad")) {  // dims tell how much, so that one number tells where
    padded.value = net.input(node, 0);
    const int pads = net.input(node, 1);
    const Attribute* mode = attribute_of(net.node(node), "mode");
    const auto& numbers = pads == kNone ? std::nullopt : net.facts(pads).elements;
    is_padding =
        (mode == nullptr || mode->text == "constant") && (net.input(node, 2) == kNone || is_zero(net.input(node, 2))) &&
        net.input(node, 3) == kNone && numbers && numbers->size() == 2 * scores.size() &&
        (*numbers)[scores.size() - 1].is(sinks.is_ahead ? 1 : 0) && numbers->back().is(sinks.is_ahead ? 0 : 1) &&
        std::count(numbers->begin(), numbers->end(), Size{0, {}}) + 1 == static_cast<int64_t>(numbers->size());
  } else if (net.is(node, "ScatterND")) {  // over the first dim
    padded = {net.input(node, 2), true};
    const auto places = affine_of(net, net.input(node, 1));
    const Attribute* reduction = attribute_of(net.node(node), "reduction");
    is_padding = is_zero(net.input(node, 0)) && net.rank(net.input(node, 1)) == 2 &&
                 net.shape(net.input(node, 1)).back().is(1) && places && places->steps.front() == 1 &&
                 places->offset.is(sinks.is_ahead ? 1 : 0) && (reduction == nullptr || reduction->text == "none");
  }
  const bool fits = is_padding && has_dims(padded.value, scores, padded.keys_first) &&
                    has_dims(net.output(node, 0), joined, padded.keys_first);
  return fits ? std::optional(padded) : std::nullopt;
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
