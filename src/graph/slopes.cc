#include "graph/slopes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <unordered_map>

#include "graph/nodes.h"
#include "graph/pointwise.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

constexpr size_t kNumPoints = 64, kFewestPoints = 8, kMostValues = 256;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNear = 1e-5, kNearBesideLargest = 1e-9;  // the second where differences of equal numbers are left

// Values at some points, each an element of scores and the elements of other tensors that meet it.
class Points {
 public:
  using Duals = std::vector<Dual>;

  Points(const Net& net, const Match& match, const Flow& flow)
      : net_(net), match_(match), flow_(flow), shape_(net.shape(match.softmax_input)) {
    add_leaves();
    // What is hidden has a weight of 0, and passes no gradient.
    const Duals* input = of(match.softmax_input);
    for (size_t i = 0; input != nullptr && i < kNumPoints; ++i) {
      bool is_hidden = (*input)[i].value == -kInfinity;
      for (const MaskTerm& term : match.terms) {
        const Duals* told = term.kind == MaskTerm::kAdded ? nullptr : of(term.value);
        is_hidden = is_hidden || (told != nullptr && ((*told)[i].value != 0) == (term.kind == MaskTerm::kHidden));
      }
      gradient_.push_back({is_hidden ? 0 : random()});
    }
  }

  // The gradient of the softmax's input, but for a number: which one.
  std::optional<double> is_gradient(int id) const {
    const Seen* seen = flow_.find(id);
    if (seen == nullptr || seen->order != Seen::kStraight || !seen->full || seen->columns != Seen::kKeys)
      return std::nullopt;
    return ratio(seen->terms, scores_gradient_of(static_cast<bool>(flow_.dropped()), false));
  }

  const Duals& gradient() const { return gradient_; }

  // Null where it is not made of what is known, number by number.
  const Duals* of(int id) {
    if (id == kNone) return nullptr;
    if (const auto found = known_.find(id); found != known_.end()) return found->second ? &*found->second : nullptr;
    if (known_.size() > kMostValues) return nullptr;
    known_[id] = std::nullopt;  // a cycle ends here
    auto made = make(id);
    auto& place = known_[id];
    place = std::move(made);
    return place ? &*place : nullptr;
  }

  // What `numbers` are of the gradient times the derivative of the softmax's input by `variable`, if that is one number.
  std::optional<double> times(const Duals& numbers, size_t variable, double unit) {
    const Duals* input = of(match_.softmax_input);
    if (input == nullptr || gradient_.empty()) return std::nullopt;
    double largest = 0, most = 0, found = 0;
    size_t count = 0;
    const auto is_told = [&](size_t i) {
      return (*input)[i].value < kInfinity && std::isfinite((*input)[i].slopes[variable]) &&
             (gradient_[i].value == 0 || std::isfinite(numbers[i].value));
    };
    for (size_t i = 0; i < kNumPoints; ++i) {
      const double slope = is_told(i) ? unit * (*input)[i].slopes[variable] : 0, expected = gradient_[i].value * slope;
      if (slope != 0) ++count;
      largest = std::max(largest, std::fabs(slope));
      if (std::fabs(expected) > most) most = std::fabs(expected), found = numbers[i].value / expected;
    }
    if (count < kFewestPoints || !std::isfinite(found) || found == 0) return std::nullopt;
    for (size_t i = 0; i < kNumPoints; ++i) {
      if (!is_told(i)) continue;
      const double gradient = std::fabs(found * gradient_[i].value), slope = unit * (*input)[i].slopes[variable];
      const double error = std::fabs(numbers[i].value - found * gradient_[i].value * slope);
      if (!(error <= gradient * (kNear * std::fabs(slope) + kNearBesideLargest * largest))) return std::nullopt;
    }
    return found;
  }

  // The nodes that made a value of what is known, ahead of it and it itself.
  void add_nodes(int id, std::vector<int>& nodes) const {
    const int node = net_.producer(id);
    const auto found = known_.find(id);
    if (node == kNone || net_.number(id) || found == known_.end() || !found->second || leaves_.contains(id) ||
        is_gradient(id) || contains(match_.nodes, node) || contains(nodes, node))
      return;
    nodes.push_back(node);
    for (size_t i = 0; i < net_.node(node).inputs.size(); ++i) {
      if (net_.input(node, i) != kNone) add_nodes(net_.input(node, i), nodes);
    }
  }

 private:
  void add_leaves() {
    constexpr size_t kScores = 0;
    leaf(net_.output(match_.scores.node, 0), kScores, [&] { return random_score(); });
    for (const MaskTerm& term : match_.terms) {
      leaf(term.value, Dual::kMost, [&] { return term.kind == MaskTerm::kAdded ? random() : random_bool(); });
    }
    for (size_t i = 0; match_.program && i < match_.program->captures.size(); ++i) {
      const int id = match_.program->captures[i];
      const bool has_slope = is_float(net_.facts(id).type);
      leaf(id, has_slope ? i + 1 : Dual::kMost, [&] { return has_slope ? random() : random_bool(); });
    }
  }

  double random_bool() { return static_cast<double>(engine_() % 2); }

  double random() {
    const double size = std::uniform_real_distribution(0.3, 2.0)(engine_);
    return engine_() % 2 == 0 ? size : -size;
  }

  // Of every size: what is done beyond some threshold is seen too.
  double random_score() {
    const double size = std::pow(10.0, std::uniform_real_distribution(-2.0, 5.0)(engine_));
    return engine_() % 2 == 0 ? random() * 2 : engine_() % 2 == 0 ? size : -size;
  }

  template <class Number>
  void leaf(int id, size_t variable, const Number& number) {
    if (id == kNone || known_.contains(id)) return;
    Duals& duals = known_[id].emplace(kNumPoints);
    for (Dual& each : duals) {
      each.value = number();
      if (variable < Dual::kMost) each.slopes[variable] = 1;
    }
    leaves_.insert(id);
  }

  std::optional<Duals> make(int id) {
    if (const auto number = net_.number(id)) return Duals(kNumPoints, Dual{*number});
    if (const auto factor = gradient_.empty() ? std::nullopt : is_gradient(id)) {
      Duals made = gradient_;
      for (Dual& each : made) each.value *= *factor;
      return made;
    }
    for (const int leaf : leaves_) {
      if (leaf != net_.output(match_.scores.node, 0) && same_value(net_, leaf, id)) return known_[leaf];
    }
    const int node = net_.producer(id);
    if (node == kNone || id != net_.output(node, 0) || is_product(net_, node)) return std::nullopt;
    if (reshapes(net_, node)) return moved(node);
    std::vector<const Duals*> operands;
    for (size_t i = 0; i < net_.node(node).inputs.size(); ++i) {
      const int input = net_.input(node, i);
      operands.push_back(of(input));
      if (input != kNone && (operands.back() == nullptr || !meets(input, id))) return std::nullopt;
    }
    Duals made;
    for (size_t point = 0; point < kNumPoints; ++point) {
      std::vector<std::optional<Dual>> at_point;
      at_point.reserve(operands.size());
      for (const Duals* each : operands)
        at_point.push_back(each == nullptr ? std::nullopt : std::optional((*each)[point]));
      const auto result = pointwise(net_, node, at_point);
      if (!result) return std::nullopt;
      made.push_back(*result);
    }
    return made;
  }

  // Elements of scores stay in their rows; of other tensors they stay in their dims, ahead of which ones may stand.
  std::optional<Duals> moved(int node) {
    const int from = net_.input(node, 0), to = net_.output(node, 0);
    const auto stripped = [&](int id) {
      auto shape = net_.shape(id);
      while (!shape.empty() && shape.front().is(1)) shape = shape.subspan(1);
      return shape;
    };
    const bool stays = same_shape(stripped(from), stripped(to)) && !net_.shape(to).empty();
    const Duals* numbers = stays || (is_full(from) && keeps_matrix(net_, node)) ? of(from) : nullptr;
    return numbers == nullptr ? std::nullopt : std::optional(*numbers);
  }

  Size count(int id) const {
    const auto shape = net_.shape(id);
    return net_.symbols().product(Sizes(shape.begin(), shape.end()));
  }
  bool is_full(int id) const {
    return net_.rank(id) > 1 && count(id) == net_.symbols().product(Sizes(shape_.begin(), shape_.end()));
  }

  // Whether elements of an operand meet those of the result that they meet in the scores.
  bool meets(int operand, int result) const {
    const auto of_result = net_.shape(result), of_operand = net_.shape(operand);
    if (net_.number(operand)) return true;
    if (same_shape(of_result, of_operand)) return !of_result.empty();
    return net_.rank(operand) >= 0 && of_result.size() <= shape_.size() && !of_result.empty() &&
           std::equal(of_result.rbegin(), of_result.rend(), shape_.rbegin(),
                      [](const Size& size, const Size& whole) { return size.is(1) || size == whole; });
  }

  const Net& net_;
  const Match& match_;
  const Flow& flow_;
  std::span<const Size> shape_;
  std::unordered_map<int, std::optional<Duals>> known_;
  std::set<int> leaves_;
  Duals gradient_;
  std::mt19937 engine_{1};
};

}  // namespace

Slopes tell_slopes(const Net& net, const Match& match, Flow& flow) {
  Slopes slopes;
  Points points(net, match, flow);
  const size_t num_captures = match.program ? match.program->captures.size() : 0;
  std::set<int> todo, seen;
  const auto take = [&](int id) {
    const Points::Duals* numbers = points.of(id);
    if (numbers == nullptr) return false;
    bool is_told = false;
    for (size_t i = 0; i < num_captures; ++i) {
      const auto times = points.times(*numbers, i + 1, 1);
      if (times) slopes.captures.push_back({id, i, *times});
      is_told = is_told || times.has_value();
    }
    const auto times =
        flow.find(id) != nullptr ? std::nullopt : points.times(*numbers, 0, match.scores.factor / match.scale);
    if (is_told || times) points.add_nodes(id, slopes.nodes);
    if (!times) return true;
    Terms terms = scores_gradient_of(static_cast<bool>(flow.dropped()), true);
    for (auto& [term, number] : terms) number *= *times;
    flow.tell(id, std::move(terms));
    return true;
  };
  slopes.inverse = points.times(points.gradient(), 0, match.scores.factor / match.scale);
  const std::set<int> readers = flow.readers();  // while more of them are told
  for (const int node : readers) {
    for (size_t i = 0; i < net.node(node).inputs.size(); ++i) {
      const int id = net.input(node, i);
      if (id == kNone || !points.is_gradient(id)) continue;
      if (seen.insert(id).second) take(id);
      todo.insert(node);
    }
  }
  while (!todo.empty() && seen.size() < kMostValues) {
    const int node = *todo.begin(), out = net.output(node, 0);
    todo.erase(todo.begin());
    if (out == kNone || contains(match.nodes, node) || !seen.insert(out).second) continue;
    if (take(out)) todo.insert(net.value(out).users.begin(), net.value(out).users.end());
  }
  return slopes;
}

}  // namespace polyhead::graph
