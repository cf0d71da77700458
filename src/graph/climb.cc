// From the softmax up to the product of queries and keys: scales, softcap and mask terms on the way.
#include <algorithm>
#include <cmath>

#include "core/sentence.h"
#include "graph/joined.h"
#include "graph/match.h"
#include "graph/nodes.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

constexpr double kHides = -1e4;  // a score that is replaced by this, or less, has no weight beside any that is not
constexpr int kMostSteps = 500;  // of all branches together: a sum of masks may hide the scores on either side

// One way up. Copied where it branches.
struct Way {
  std::vector<int> nodes;
  double factor = 1;  // on what is above, up to the softmax or the tanh below
  double scale = 1, softcap = 0;
  std::vector<RowFactor> row_factors;
  std::vector<MaskTerm> terms;
  std::vector<Score> passed;
  std::vector<std::string> words;
  std::optional<Product> product;
  int rounding = kNone;  // the first node that makes integers of the scores, or computes with such
  std::string reason;
};

class Climber {
 public:
  // `has_sinks`: beside the scores stands a logit that no number is added to.
  Climber(const Net& net, bool has_sinks) : net_(net), has_sinks_(has_sinks) {}

  Way climb(int id, Way way) {
    while (true) {
      const int node = net_.producer(id);
      if (node == kNone)
        return stop(way, sentence("no product of queries and keys: the scores come from \"", name(id), "\""));
      if (++steps_ > kMostSteps) return stop(way, sentence("more than ", kMostSteps, " nodes before the softmax"));
      // The operator's scores have the factors of rows already.
      if (way.row_factors.empty()) way.passed.push_back({id, way.factor, way.softcap > 0, way.terms.size()});
      way.nodes.push_back(node);
      if (is_product(net_, node)) return arrive(node, std::move(way));
      if (net_.is(node, "Where")) return where(node, way);
      if (net_.is(node, "Add") || net_.is(node, "Sub")) {
        if (const auto uniform = way.softcap > 0 ? std::nullopt : shifted(node)) {
          way.passed.clear();  // the operator's scores lack the number
          id = *uniform;
          continue;
        }
        return add(node, way);
      }
      const int next = step(node, way);
      if (next == kNone) return way;
      id = next;
    }
  }

 private:
  std::string name(int id) const { return id == kNone ? "" : std::string(net_.value(id).name); }

  static Way stop(Way& way, std::string reason) {
    way.reason = std::move(reason);
    return std::move(way);
  }

  Way arrive(int node, Way way) {
    way.product = scores_product(net_, node, way.reason);
    if (!way.product) return way;
    if (way.rounding != kNone) way.reason = rounded(way.rounding);
    way.scale = way.factor * way.product->factor;
    return way;
  }

  // A number that is added to all scores alike, or taken from them, changes no weight.
  std::optional<int> shifted(int node) const {
    for (size_t side = net_.is(node, "Sub") ? 1 : 0; side < 2 && !has_sinks_; ++side) {
      const auto number = net_.number(net_.input(node, side));
      if (number && std::isfinite(*number) && std::fabs(*number) < 1e6 && keeps_shape(net_, node, 1 - side)) {
        return net_.input(node, 1 - side);
      }
    }
    return std::nullopt;
  }

  // Both sides of a node may lead to the scores; the way that comes further is the answer.
  template <class Take>
  Way branch(int node, Way& way, std::initializer_list<size_t> sides, Take take) {
    Way best;
    for (size_t side : sides) {
      Way next = way;
      if (!keeps_shape(net_, node, side)) {
        next.reason = sentence(words_of(net_, node), " gives the scores more dims, or of another size, than \"",
                               name(net_.input(node, side)), "\" has, or their shape is not known");
      } else {
        next = take(side, std::move(next));
      }
      if (next.product) return next;
      if (best.reason.empty() || next.nodes.size() > best.nodes.size()) best = std::move(next);
    }
    return best;
  }

  Way add(int node, Way& way) {
    const bool is_sub = net_.is(node, "Sub");
    const auto take = [&](size_t side, Way next) {
      if (next.softcap > 0 || !next.row_factors.empty()) {
        return stop(next, sentence("something is added before the softcap, or before what rows are multiplied by, at ",
                                   words_of(net_, node)));
      }
      const int mask = net_.input(node, 1 - side);
      next.terms.push_back(
          {MaskTerm::kAdded, mask, is_sub ? -next.factor : next.factor, node, net_.shape(net_.output(node, 0)).size()});
      return climb(net_.input(node, side), std::move(next));
    };
    return is_sub ? branch(node, way, {0}, take) : branch(node, way, {0, 1}, take);
  }

  Way where(int node, Way& way) {
    return branch(node, way, {1, 2}, [&](size_t side, Way next) {
      const auto fill = net_.number(net_.input(node, 3 - side));
      if (!fill) {
        return stop(next, sentence("the scores and \"", name(net_.input(node, 3 - side)),
                                   "\", which is no constant, are mixed by ", words_of(net_, node)));
      }
      const double number = *fill * next.factor;
      const bool is_early = next.softcap > 0 || !next.row_factors.empty();
      if (is_early || !(number <= kHides)) {
        return stop(next, sentence(words_of(net_, node), " gives hidden scores the number ", number,
                                   is_early ? " before the softcap, or before what rows are multiplied by"
                                            : ", must be -10000 or less to hide them"));
      }
      next.terms.push_back({side == 1 ? MaskTerm::kVisible : MaskTerm::kHidden, net_.input(node, 0), number, node,
                            net_.shape(net_.output(node, 0)).size()});
      return climb(net_.input(node, side), std::move(next));
    });
  }

  // A node of which one input is the scores: that input, or kNone and a reason.
  int step(int node, Way& way) {
    const std::string& op = net_.node(node).op_type;
    if (rounds(net_, node)) return rounded_step(node, way);
    if (!net_.node(node).domain.empty()) return refuse(node, way, " between the products is not understood");
    if (op == "Mul" || op == "Div") return scaled(node, way);
    if (op == "Tanh" && way.softcap == 0 && way.row_factors.empty()) {
      way.softcap = way.factor;
      if (!(way.softcap > 0)) return refuse(node, way, " is scaled by a number that is not positive");
      way.words.push_back("softcap");
      way.factor = 1;
      return net_.input(node, 0);
    }
    if (op == "Identity" || is_idle_dropout(net_, node)) return net_.input(node, 0);
    if (op == "Cast" && is_float(net_.facts(net_.output(node, 0)).type)) {
      if (way.words.empty() || way.words.back() != "casts") way.words.push_back("casts");
      return net_.input(node, 0);
    }
    if (reshapes(net_, node)) {
      return keeps_matrix(net_, node) ? net_.input(node, 0)
                                      : refuse(node, way, " changes the last two dims of the scores");
    }
    if (op == "Transpose") return refuse(node, way, " stands between the product and the softmax and does not cancel");
    if (op == "Concat") {
      const std::string why = why_not_joined(net_, node);
      return refuse(node, way, sentence(" joins the scores with others", why.empty() ? "" : ": ", why));
    }
    return refuse(node, way, " between the products is not understood");
  }

  // Past the rounding, so that of two branches the one that leads to a product is taken.
  int rounded_step(int node, Way& way) const {
    const bool is_told = way.rounding != kNone && !net_.is(way.rounding, "DequantizeLinear");
    if (!is_told) way.rounding = node;
    if (net_.is(node, "QuantizeLinear") || net_.is(node, "DequantizeLinear")) return net_.input(node, 0);
    way.reason = rounded(way.rounding);
    return kNone;
  }

  std::string rounded(int node) const {
    return words_of(net_, node) + " rounds the scores, or what they are made of, to integers";
  }

  int refuse(int node, Way& way, const std::string& why) const {
    way.reason = words_of(net_, node) + why;
    return kNone;
  }

  int scaled(int node, Way& way) const {
    const auto scaled = scaled_by(net_, node);
    if (!scaled) return scaled_by_rows(node, way);
    if (!keeps_shape(net_, node, scaled->side)) return refuse(node, way, " changes the shape of the scores");
    way.factor = scaled->of(way.factor);
    return std::isfinite(way.factor) ? scaled->value : refuse(node, way, " scales by a number that is not finite");
  }

  int scaled_by_rows(int node, Way& way) const {
    const bool divides = net_.is(node, "Div");
    for (const size_t side : {size_t{0}, size_t{1}}) {
      const int factor = net_.input(node, 1 - side);
      const bool is_of_rows = net_.rank(factor) == 0 || (net_.rank(factor) > 0 && net_.shape(factor).back().is(1));
      if (!is_of_rows || (divides && side == 1) || !keeps_shape(net_, node, side)) continue;
      way.row_factors.push_back({factor, divides});
      return net_.input(node, side);
    }
    return refuse(node, way, " scales the scores by what is not a constant number, nor one for each row");
  }

  const Net& net_;
  bool has_sinks_;
  int steps_ = 0;
};

}  // namespace

bool meets_product(const Net& net, int id, Side side) {
  constexpr size_t kMostValues = 500;
  std::vector<int> values = {id};
  const auto add = [&](int value) {
    if (value != kNone && std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
  };
  for (size_t i = 0; i < values.size() && values.size() < kMostValues; ++i) {
    const std::vector<int> above = {net.producer(values[i])};
    for (int node : side == Side::kBefore ? above : net.value(values[i]).users) {
      if (node == kNone || net.is(node, "Shape")) continue;
      if (multiplies_stacks(net, node)) return true;
      if (is_product(net, node) || is_rounded_product(net, node) || net.is(node, "Gemm")) continue;
      const Node& n = net.node(node);
      const size_t count = side == Side::kBefore ? n.inputs.size() : n.outputs.size();
      for (size_t k = 0; k < count; ++k) add(side == Side::kBefore ? net.input(node, k) : net.output(node, k));
    }
  }
  return false;
}

void climb_scores(const Net& net, Match& match) {
  Way way = Climber(net, match.sinks.has_value()).climb(match.softmax_input, {});
  match.reason = way.reason;
  if (!way.reason.empty()) {
    match.is_attention = meets_product(net, match.softmax_input, Side::kBefore);
    return;
  }
  match.scores = *way.product;
  match.softcap = way.softcap;
  // softcap * tanh(b x) is the softcap of softcap * b * x
  match.scale = way.softcap > 0 ? way.softcap * way.scale : way.scale;
  match.row_factors = std::move(way.row_factors);
  match.terms = std::move(way.terms);
  match.passed = std::move(way.passed);
  match.words.insert(match.words.end(), way.words.begin(), way.words.end());
}

}  // namespace polyhead::graph
