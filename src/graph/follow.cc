// From the softmax down to the product with the values: guards, dropout, casts and factors on the way.
#include <algorithm>
#include <cmath>

#include "core/sentence.h"
#include "graph/match.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

// What a boolean tells of the rows of the scores.
enum class Told {
  kNothing,
  kHidden,      // of each score: it is -inf
  kVisible,     // of each score: it is not
  kAllHidden,   // of each row
  kAnyVisible,  // of each row
};

Told negated(Told told) {
  switch (told) {
    case Told::kHidden: return Told::kVisible;
    case Told::kVisible: return Told::kHidden;
    case Told::kAllHidden: return Told::kAnyVisible;
    case Told::kAnyVisible: return Told::kAllHidden;
    default: return Told::kNothing;
  }
}

class Follower {
 public:
  Follower(const Net& net, const Anchor& anchor, Match& match, Backwards backwards)
      : net_(net), scores_(anchor.input), match_(match), backwards_(backwards) {}

  void follow(int id) {
    for (int weights = id; weights != kNone;) {
      match_.weights = weights;
      int next = kNone;
      if (const int node = product_of(weights); node != kNone) return arrive(node, weights);
      for (int user : net_.value(weights).users) {
        next = passed(user, weights);
        if (next != kNone) break;
      }
      if (next == kNone) {
        const int rounding = rounding_before_product(weights, 0);
        match_.is_attention = rounding != kNone;
        match_.reason =
            rounding != kNone ? sentence("the weights are rounded to integers by ", words_of(net_, rounding))
            : net_.value(weights).users.empty() ? "no product with values follows the softmax"
                                                : sentence("no product with values follows the softmax, but ",
                                                           words_of(net_, net_.value(weights).users.front()));
      }
      weights = next;
    }
  }

 private:
  // The only product that reads the weights.
  int product_of(int weights) const {
    for (int user : net_.value(weights).users) {
      if (is_product(net_, user)) return user;
    }
    return kNone;
  }

  // The first node on a way of quantised ones to a product, or kNone.
  int rounding_before_product(int id, int depth) const {
    constexpr int kMostNodes = 4;
    for (int user : net_.value(id).users) {
      if (is_product(net_, user) && depth > 0) return user;
      if (!rounds(net_, user) || net_.output(user, 0) == kNone || depth > kMostNodes) continue;
      const bool multiplies = net_.node(user).op_type.find("MatMul") != std::string::npos;
      if (multiplies || rounding_before_product(net_.output(user, 0), depth + 1) != kNone) return user;
    }
    return kNone;
  }

  void arrive(int node, int weights) {
    match_.nodes.push_back(node);
    auto product = weights_product(net_, node, weights, match_.reason);
    if (!product) return;
    match_.out_factor *= product->factor;
    match_.result = *product;
    match_.out = net_.output(node, 0);
  }

  // What the node makes of the weights, if that is weights again, or kNone.
  int passed(int node, int weights) {
    if (!net_.node(node).domain.empty()) return kNone;
    const std::string& op = net_.node(node).op_type;
    const int out = net_.output(node, 0);
    const auto take = [&] {
      match_.nodes.push_back(node);
      return out;
    };
    if (op == "Identity" || (op == "Cast" && is_float(net_.facts(out).type))) return take();
    if (op == "Dropout") {
      const int training = net_.input(node, 2);
      const bool idle = (training == kNone || net_.number(training) == 0.0) &&
                        (net_.output(node, 1) == kNone || net_.value(net_.output(node, 1)).users.empty());
      if (idle) match_.words.push_back("idle Dropout");
      return idle || drops(node) ? take() : kNone;
    }
    if (op == "Reshape" || op == "Unsqueeze" || op == "Squeeze") {
      const auto before = net_.shape(weights), after = net_.shape(out);
      const bool kept = before.size() >= 2 && after.size() >= 2 && before.back() == after.back() &&
                        before[before.size() - 2] == after[after.size() - 2];
      return kept ? take() : kNone;
    }
    if (op == "Mul" || op == "Div") {
      const size_t side = net_.input(node, 0) == weights ? 0 : 1;
      const auto number = net_.number(net_.input(node, 1 - side));
      if (!number || (op == "Div" && side == 1) || net_.rank(out) != net_.rank(weights)) return kNone;
      match_.out_factor = op == "Mul" ? match_.out_factor * *number : match_.out_factor / *number;
      return take();
    }
    if (op == "Where" && is_guard(node, weights)) {
      match_.words.push_back("a guard of rows that see no key");
      return take();
    }
    return kNone;
  }

  // Dropout in training, which a backward repeats.
  bool drops(int node) {
    const auto p = net_.input(node, 1) == kNone ? std::optional(0.5) : net_.number(net_.input(node, 1));
    if (backwards_ == Backwards::kOfNobody || net_.number(net_.input(node, 2)) != 1.0 || match_.dropout_p > 0 || !p ||
        !(*p > 0 && *p < 1))
      return false;
    match_.dropout_p = *p;
    match_.dropout = node;
    match_.words.push_back("dropout");
    return true;
  }

  // where(row sees nothing, 0, weights), told by NaN of the weights or by the scores.
  bool is_guard(int node, int weights) {
    const int condition = net_.producer(net_.input(node, 0));
    const auto zero = [&](size_t at) { return net_.number(net_.input(node, at)) == 0.0; };
    if (condition == kNone) return false;
    if (net_.is(condition, "IsNaN") && net_.input(condition, 0) == weights && zero(1)) {
      match_.nodes.push_back(condition);
      return true;
    }
    std::vector<int> nodes;
    const Told told = read(net_.input(node, 0), nodes, 0);
    for (size_t at : {size_t{1}, size_t{2}}) {  // a zero that is cast like the weights
      const int zero_like = net_.producer(net_.input(node, at));
      if (net_.is(zero_like, "CastLike") && net_.input(zero_like, 1) == weights) nodes.push_back(zero_like);
    }
    const bool guards = (told == Told::kAllHidden && zero(1) && net_.input(node, 2) == weights) ||
                        (told == Told::kAnyVisible && zero(2) && net_.input(node, 1) == weights);
    if (guards) match_.nodes.insert(match_.nodes.end(), nodes.begin(), nodes.end());
    return guards;
  }

  // Whether a node reduces over the last dim alone, and keeps it.
  bool keeps_last(int node) const {
    const auto axes = axes_of(net_, node);
    const int last = net_.rank(net_.input(node, 0)) - 1;
    return axes && axes->size() == 1 && (axes->front() == -1 || axes->front() == last) &&
           integer_of(net_.node(node), "keepdims", 1) != 0;
  }

  Told read(int id, std::vector<int>& nodes, int depth) {
    const int node = net_.producer(id);
    if (node == kNone || depth > 12) return Told::kNothing;
    nodes.push_back(node);
    if (net_.is(node, "Equal")) {
      const auto number = net_.number(net_.input(node, 1));
      if (!number || !std::isinf(*number) || *number > 0) return Told::kNothing;
      if (net_.input(node, 0) == scores_) return Told::kHidden;
      const int maximum = net_.producer(net_.input(node, 0));
      if (!net_.is(maximum, "ReduceMax") || !keeps_last(maximum)) return Told::kNothing;
      match_.guarding_mask = net_.input(maximum, 0);  // whether it is one is seen when all masks are known
      nodes.push_back(maximum);
      return Told::kAllHidden;
    }
    if (net_.is(node, "Cast")) return read(net_.input(node, 0), nodes, depth + 1);
    if (net_.is(node, "Not")) return negated(read(net_.input(node, 0), nodes, depth + 1));
    const bool maximum = net_.is(node, "ReduceMax"), minimum = net_.is(node, "ReduceMin");
    if ((!maximum && !minimum) || !keeps_last(node)) return Told::kNothing;
    const Told each = read(net_.input(node, 0), nodes, depth + 1);
    if (maximum && each == Told::kVisible) return Told::kAnyVisible;
    return minimum && each == Told::kHidden ? Told::kAllHidden : Told::kNothing;
  }

  const Net& net_;
  int scores_;
  Match& match_;
  Backwards backwards_;
};

bool contains(const std::vector<int>& nodes, int node) {
  return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
}

// A guard that was told by a mask: the mask has to be one that is added to the scores.
void check_guard(const Net& net, Match& match) {
  if (match.guarding_mask == kNone) return;
  const auto number = net.number(match.guarding_mask);
  if (number && std::isfinite(*number)) return;  // it hides nothing
  for (const MaskTerm& term : match.terms) {
    if (term.kind == MaskTerm::kAdded && term.value == match.guarding_mask && term.number > 0) return;
  }
  match.reason = "the weights of some rows are set to 0, by what is no mask of the scores";
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

// Nobody else reads what goes away; one of the scores, or the weights, may be returned where there is no backward.
void check_users(const Net& net, Match& match, Backwards backwards) {
  const bool no_returns = match.backward || backwards == Backwards::kOfOperator;
  std::vector<int> nodes = match.nodes, kept = {match.out};
  if (match.backward) {
    const Backward& b = *match.backward;
    nodes.insert(nodes.end(), b.nodes.begin(), b.nodes.end());
    kept.insert(kept.end(), {b.query.value, b.key.value, b.value.value, b.bias});
  }
  for (int node : nodes) {
    for (size_t i = 0; i < net.node(node).outputs.size(); ++i) {
      const int id = net.output(node, i);
      if (id == kNone || contains(kept, id)) continue;
      const NetValue& value = net.value(id);
      int other = kNone;
      for (int user : value.users) {
        if (!contains(nodes, user)) other = user;
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

}  // namespace

Match match_attention(const Net& net, const Anchor& anchor, Backwards backwards) {
  Match match;
  match.nodes = anchor.nodes;
  match.softmax_input = anchor.input;
  match.softmax_output = anchor.output;
  match.exponentials = anchor.exponentials;
  Follower(net, anchor, match, backwards).follow(anchor.output);
  if (!match.reason.empty()) return match;
  match.reason = anchor.reason;
  if (match.reason.empty()) climb_scores(net, anchor, match);
  if (!anchor.words.empty()) match.words.push_back(anchor.words);
  std::sort(match.nodes.begin(), match.nodes.end());
  match.nodes.erase(std::unique(match.nodes.begin(), match.nodes.end()), match.nodes.end());
  if (match.reason.empty()) check_guard(net, match);
  if (match.reason.empty() && backwards == Backwards::kOfGraph) match.backward = find_backward(net, match);
  if (match.backward) match.reason = match.backward->reason;
  if (match.reason.empty() && match.dropout_p > 0 && backwards == Backwards::kOfGraph && !match.backward)
    match.reason = words_of(net, match.dropout) + " drops weights at random, and no backward is found beside it";
  if (match.reason.empty()) check_users(net, match, backwards);
  return match;
}

}  // namespace polyhead::graph
