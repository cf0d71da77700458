// Attention around a softmax: down to the product with the values, up to that of queries and keys (climb.cc), and what
// else reads what is between.
#include "graph/match.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "core/sentence.h"
#include "graph/nodes.h"

namespace polyhead::graph {
namespace {

// What amounts to a softmax over the last dim, or begins one.
struct Softmax {
  int input = kNone;
  int value = kNone;  // what is known of it: the weights, or exponentials of which these are made
  Terms terms = weights_of(false);
  std::string words = {};
  std::string reason = {};  // why it is none over the last dim
};

// x of x - r, where r is one number for each row, such as the row's maximum, which all weights lose alike; else itself.
int without_shift(const Net& net, int id) {
  const int sub = net.producer(id);
  if (!net.is(sub, "Sub") || !keeps_shape(net, sub, 0)) return id;
  int rows = net.input(sub, 1);
  if (const int node = net.producer(rows); net.is(node, "Expand")) rows = net.input(node, 0);
  const auto last = net.shape(rows);
  return !last.empty() && last.back().is(1) ? net.input(sub, 0) : id;
}

Softmax softmax_of(const Net& net, int node) {
  Softmax softmax = {without_shift(net, net.input(node, 0)), net.output(node, 0)};
  const int rank = net.rank(softmax.input);
  const int64_t axis = integer_of(net.node(node), "axis", net.opset() < 13 ? 1 : -1);
  const bool last = axis == rank - 1 || (axis == -1 && (net.opset() >= 13 || rank > 0));
  if (!last) {
    softmax.reason = rank < 0
                         ? sentence("the number of dims of the scores of ", words_of(net, node), " is not known")
                         : sentence(words_of(net, node), " runs over axis ", axis, " of ", rank, ", not over the keys");
  }
  return softmax;
}

std::optional<Softmax> softmax_at(const Net& net, int node) {
  if (net.is(node, "Softmax")) return softmax_of(net, node);
  if (!net.is(node, "Exp")) return std::nullopt;
  const int output = net.output(node, 0), before = net.producer(net.input(node, 0));
  if (net.is(before, "LogSoftmax")) {
    Softmax softmax = softmax_of(net, before);
    softmax.value = output;
    softmax.words = "softmax by LogSoftmax";
    return softmax;
  }
  const int reduced = net.is(before, "Sub") ? net.producer(net.input(before, 1)) : kNone;
  const bool normalised = net.is(reduced, "ReduceLogSumExp") && reduces_last(net, reduced) &&
                          net.input(reduced, 0) == net.input(before, 0) && keeps_shape(net, before, 0);
  if (normalised) return Softmax{net.input(before, 0), output, weights_of(false), "softmax by ReduceLogSumExp"};
  return Softmax{
      without_shift(net, net.input(node, 0)), output, {{Term{{1, 0, 0}}, 1}}, "softmax by Exp and ReduceSum"};
}

bool is_straight(const Seen* seen) {
  return seen != nullptr && seen->order == Seen::kStraight && seen->columns == Seen::kKeys;
}

// The first value that is weights, as they come from the softmax.
int first_weights(const Net& net, const Flow& flow, const Softmax& softmax) {
  const Seen* seen = flow.find(softmax.value);
  if (is_straight(seen) && ratio(seen->terms, weights_of(false))) return softmax.value;
  for (int node : flow.readers()) {
    seen = flow.find(net.output(node, 0));
    if (is_straight(seen) && ratio(seen->terms, weights_of(false))) return net.output(node, 0);
  }
  return kNone;
}

// The first node that rounds, past nodes that move elements, ahead of a product of stacks; or kNone.
int rounding_before_product(const Net& net, int id) {
  constexpr size_t kMostValues = 8;
  int num_left = 16;  // of rounding nodes that are followed
  std::vector<int> values = {id};
  for (size_t i = 0; i < values.size() && i < kMostValues; ++i) {
    for (int user : net.value(values[i]).users) {
      const int output = net.output(user, 0);
      if (output == kNone) continue;
      if (rounds(net, user)) {
        if (num_left-- <= 0) return kNone;
        if (multiplies_stacks(net, user) || meets_product(net, output, Side::kBehind)) return user;
      } else if (reshapes(net, user) || net.is(user, "Transpose") || net.is(user, "Cast")) {
        values.push_back(output);
      }
    }
  }
  return kNone;
}

// A softmax of integers, whose weights are integers too; nothing if a node is none.
std::optional<Match> softmax_of_integers(const Net& net, int node) {
  if (net.node(node).op_type != "QLinearSoftmax" || net.output(node, 0) == kNone) return std::nullopt;
  Match match;
  match.softmax = node;
  match.softmax_input = net.input(node, 0);
  match.softmax_output = net.output(node, 0);
  match.is_attention =
      meets_product(net, match.softmax_input, Side::kBefore) && meets_product(net, match.softmax_output, Side::kBehind);
  match.reason = words_of(net, node) + " is a softmax of integers: its scores and weights are rounded";
  return match;
}

// The product with the values.
void follow(const Net& net, const Flow& flow, Match& match) {
  int weights = match.softmax_output;
  for (int node : flow.readers()) {
    for (size_t side : {size_t{0}, size_t{1}}) {
      const Seen* seen = is_product(net, node) ? flow.find(net.input(node, side)) : nullptr;
      const auto times = is_straight(seen) ? ratio(seen->terms, flow.weights()) : std::nullopt;
      if (!times) continue;
      match.weights = net.input(node, side);
      match.out = net.output(node, 0);
      const auto product = weights_product(net, node, match.weights, match.reason);
      if (product) match.result = *product;
      if (product) match.out_factor = *times * product->factor / flow.dropped().keep();
      return;
    }
    const Seen* seen = flow.find(net.output(node, 0));
    if (is_straight(seen) && ratio(seen->terms, flow.weights())) weights = net.output(node, 0);
  }
  const int rounding = rounding_before_product(net, weights);
  const std::vector<int>& users = net.value(weights).users;
  match.is_attention = meets_product(net, match.softmax_input, Side::kBefore) &&
                       (rounding != kNone || meets_product(net, weights, Side::kBehind));
  match.reason = rounding != kNone ? sentence("the weights are rounded to integers by ", words_of(net, rounding))
                                   : sentence("no product with values follows the softmax",
                                              users.empty() ? "" : sentence(", but ", words_of(net, users.front())));
}

// A guard that was told by a mask: the mask has to be one that is added to the scores.
void check_guards(const Net& net, const Flow& flow, Match& match) {
  for (const auto& [node, mask] : flow.guards()) {
    const auto number = net.number(mask);
    if (mask == kNone || (number && std::isfinite(*number))) continue;  // it hides nothing
    const bool is_told = std::any_of(match.terms.begin(), match.terms.end(), [&, told = mask](const MaskTerm& term) {
      return term.kind == MaskTerm::kAdded && term.value == told && term.number > 0;
    });
    if (!is_told) match.reason = "the weights of some rows are set to 0, by what is no mask of the scores";
  }
}

// Which of the operator's tensors of scores or weights a value is.
std::optional<Returned::Mode> mode_of(const Match& match, int id) {
  if (id == match.weights) return match.out_factor == 1 ? std::optional(Returned::kWeights) : std::nullopt;
  for (const Score& score : match.passed) {
    if (score.value != id) continue;
    if (score.before_cap) {  // softcap * tanh(factor * x) is that of x itself
      const bool is_raw = std::fabs(match.softcap * score.factor - 1) < 1e-6;
      return is_raw ? std::optional(Returned::kScores) : std::nullopt;
    }
    if (score.factor != 1) return std::nullopt;
    if (score.num_terms == match.terms.size()) return match.softcap > 0 ? Returned::kCapped : Returned::kScores;
    return score.num_terms == 0 ? std::optional(Returned::kMasked) : std::nullopt;
  }
  return std::nullopt;
}

// Whether what a node gives is read by these alone, such as the place of a maximum, and not by the operator: it goes away
// with them.
bool is_only_for(const Net& net, int node, const std::vector<int>& nodes, const std::vector<int>& read) {
  for (size_t i = 0; i < net.node(node).outputs.size(); ++i) {
    const int id = net.output(node, i);
    if (id == kNone) continue;
    const std::vector<int>& users = net.value(id).users;
    if (users.empty() || net.value(id).is_output || contains(read, id) ||
        !std::all_of(users.begin(), users.end(), [&](int user) { return contains(nodes, user); }))
      return false;
  }
  return true;
}

// Nobody else reads what goes away, but for its shape; one of the scores, or the weights, may be returned where there
// is no backward.
void check_users(const Net& net, Match& match, Backwards backwards) {
  const bool no_returns = match.backward || backwards == Backwards::kOfOperator;
  std::vector<int> nodes = match.nodes, kept = {match.out}, read = reads(match);
  read.insert(read.end(), {match.scores.left.value, match.scores.right.value});
  if (match.backward) {
    const Backward& b = *match.backward;
    read.push_back(b.grad_out.value);
    nodes.insert(nodes.end(), b.nodes.begin(), b.nodes.end());
    kept.insert(kept.end(), {b.query.value, b.key.value, b.value.value, b.bias, b.sinks});
    kept.insert(kept.end(), b.captures.begin(), b.captures.end());
  }
  for (int node : nodes) {
    for (size_t i = 0; i < net.node(node).outputs.size(); ++i) {
      const int id = net.output(node, i);
      if (id == kNone || contains(kept, id)) continue;
      const NetValue& value = net.value(id);
      int other = kNone;
      for (int user : value.users) {
        if (contains(nodes, user) || is_only_for(net, user, nodes, read)) continue;
        if (net.is(user, "Shape")) {
          match.shapes.push_back(user);
        } else {
          other = user;
        }
      }
      if (!value.is_output && other == kNone) continue;
      const auto mode = no_returns ? std::nullopt : mode_of(match, id);
      if (mode && (match.returned.value == kNone || match.returned.value == id)) {
        match.returned = {id, *mode};
        continue;
      }
      match.reason =
          value.is_output
              ? sentence("\"", value.name, "\", of ", words_of(net, node), ", is an output of the graph")
              : sentence("\"", value.name, "\", of ", words_of(net, node), ", is also read by ", words_of(net, other));
      return;
    }
  }
}

// What is returned comes out of the operator: nothing that goes into it may be made of that.
void check_returned(const Net& net, Match& match) {
  const int returned = match.returned.value;
  const int made = returned == kNone ? kNone : first_made_of(net, returned, reads(match));
  if (made == kNone) return;
  match.reason = sentence("it reads \"", net.value(made).name, "\", which is made of \"", net.value(returned).name,
                          "\", its own scores or weights");
}

// The nodes that the operator replaces, and what those behind the softmax are.
void gather_nodes(const Net& net, const Flow& flow, Match& match) {
  match.nodes = nodes_between(net, match.scores.node, match.result.node, reads(match));
  std::vector<std::string> words;
  for (int node : match.nodes) {
    if (is_idle_dropout(net, node) && flow.find(net.output(node, 0)) != nullptr) words.push_back("idle Dropout");
    if (node == flow.dropped().node) words.push_back("dropout");
    if (flow.guards().contains(node)) words.push_back("a guard of rows that see no key");
  }
  match.words.insert(match.words.begin(), words.begin(), words.end());
}

// What the climb has no words for, or their gradients, as a program, which our operator takes.
bool find_program(const Net& net, Match& match) {
  match.program = score_program_of(net, match.softmax_input);
  if (!match.program) return false;
  match.scores = match.program->product;
  match.scale = match.program->factor;
  match.softcap = 0;
  match.row_factors.clear();
  match.terms.clear();
  match.passed.clear();
  match.reason.clear();
  match.is_attention = true;
  return true;
}

// What is around the scores and the weights: the operator's nodes, its backward, and who else reads what goes away.
void finish(const Net& net, Flow flow, Backwards backwards, Match& match) {
  gather_nodes(net, flow, match);
  check_guards(net, flow, match);
  if (match.reason.empty() && backwards == Backwards::kOfGraph) match.backward = find_backward(net, match, flow);
  if (match.backward) match.reason = match.backward->reason;
  if (match.reason.empty() && match.dropped && backwards == Backwards::kOfGraph && !match.backward)
    match.reason = words_of(net, match.dropped.node) + " drops weights at random, and no backward is found beside it";
  if (match.reason.empty()) check_users(net, match, backwards);
  if (match.reason.empty()) check_returned(net, match);
}

}  // namespace

std::vector<int> reads(const Match& match) {
  std::vector<int> read = {match.result.right.value};
  for (const RowFactor& factor : match.row_factors) read.push_back(factor.value);
  for (const MaskTerm& term : match.terms) read.push_back(term.value);
  if (match.sinks) read.push_back(match.sinks->logits);
  if (match.program) read.insert(read.end(), match.program->captures.begin(), match.program->captures.end());
  return read;
}

bool tells_bias(const Net& net, const Match& match) {
  if (!match.backward || match.backward->bias == kNone) return true;
  const auto added = std::find_if(match.terms.begin(), match.terms.end(),
                                  [](const MaskTerm& term) { return term.kind == MaskTerm::kAdded; });
  if (added == match.terms.end() || added->number != 1) return false;
  const auto bias = net.shape(added->value);
  return std::all_of(match.terms.begin(), match.terms.end(), [&](const MaskTerm& term) {
    const auto shape = net.shape(term.value);
    return shape.size() <= bias.size() &&
           std::equal(shape.rbegin(), shape.rend(), bias.rbegin(),
                      [](const Size& size, const Size& whole) { return size.is(1) || size == whole; });
  });
}

int first_made_of(const Net& net, int from, const std::vector<int>& values) {
  std::vector<int> todo = {from};
  std::unordered_set<int> made = {from};
  while (!todo.empty()) {
    const int id = todo.back();
    todo.pop_back();
    if (id != from && contains(values, id)) return id;
    for (int user : net.value(id).users) {
      for (size_t i = 0; i < net.node(user).outputs.size(); ++i) {
        const int next = net.output(user, i);
        if (next != kNone && made.insert(next).second) todo.push_back(next);
      }
    }
  }
  return kNone;
}

std::optional<Match> match_at(const Net& net, int node, const FuseOptions& options) {
  if (auto match = softmax_of_integers(net, node)) return match;
  const Backwards backwards = options.backwards;
  auto softmax = softmax_at(net, node);
  if (!softmax) return std::nullopt;
  Match match;
  const int softmax_node = net.producer(softmax->value), joined = softmax->value;
  if (ratio(softmax->terms, weights_of(false))) match.sinks = sinks_of(net, softmax->input, softmax->value);
  if (match.sinks) {
    softmax->input = match.sinks->scores;
    softmax->value = match.sinks->weights;
  }
  Flow flow(net, softmax->input, backwards, match.sinks);
  flow.tell(joined, softmax->terms, match.sinks ? Seen::kJoined : Seen::kKeys);
  match.softmax_input = softmax->input;
  match.softmax_output = first_weights(net, flow, *softmax);
  if (match.softmax_output == kNone) return std::nullopt;
  match.softmax = match.sinks ? softmax_node : net.producer(match.softmax_output);
  follow(net, flow, match);
  if (match.reason.empty()) match.reason = softmax->reason;
  match.dropped = flow.dropped();
  if (!match.reason.empty()) return match;
  const bool with_programs = options.target == Target::kPolyhead && backwards != Backwards::kOfOperator;
  Match other = match;  // by a program
  climb_scores(net, match);
  if (!match.reason.empty() && with_programs) find_program(net, match);
  if (!match.reason.empty()) return match;
  for (Match* each : {&match, &other}) {
    if (!softmax->words.empty()) each->words.push_back(softmax->words);
  }
  finish(net, flow, backwards, match);
  const bool is_short = match.backward && !match.program &&
                        (!match.reason.empty() || !match.row_factors.empty() || !tells_bias(net, match));
  if (!is_short || !with_programs || !find_program(net, other)) return match;
  finish(net, flow, backwards, other);
  return other.reason.empty() && other.backward ? other : match;
}

}  // namespace polyhead::graph
