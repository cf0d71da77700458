// The backward of an attention: products of what the graph makes of the weights and of their gradient (flow.h) with the
// operands again.
#include <algorithm>
#include <set>

#include "core/sentence.h"
#include "graph/layout.h"
#include "graph/match.h"
#include "graph/nodes.h"
#include "graph/slopes.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

class Gatherer {
 public:
  // `start`: the product that gives the gradient of the weights, which `flow` knows, or kNone.
  Gatherer(const Net& net, const Match& match, const Flow& flow, int start, Slopes slopes = {})
      : net_(net), match_(match), flow_(flow), start_(start), slopes_(std::move(slopes)) {
    std::set<int> readers = flow.readers();
    for (const CaptureGradient& each : slopes_.captures) {
      readers.insert(net.value(each.value).users.begin(), net.value(each.value).users.end());
    }
    readers.insert(slopes_.nodes.begin(), slopes_.nodes.end());
    for (int node : readers) {
      if (contains(match.nodes, node) || node == start) continue;
      const bool multiplies = is_product(net, node) &&
                              (flow.find(net.input(node, 0)) != nullptr || flow.find(net.input(node, 1)) != nullptr);
      const bool is_known = flow.find(net.output(node, 0)) != nullptr || contains(slopes_.nodes, node);
      (multiplies ? products_ : is_known ? nodes_ : strangers_).push_back(node);
    }
  }

  // Whether the weights and their gradient meet.
  bool meets() const {
    return std::any_of(nodes_.begin(), nodes_.end(), [&](int node) {
      const Seen* seen = flow_.find(net_.output(node, 0));
      const Terms terms = seen == nullptr ? Terms() : seen->terms;
      return std::any_of(terms.begin(), terms.end(), [](const auto& each) {
        const Term& term = each.first;
        return term.kind == Term::kRowSum || (term.kind == Term::kGradient && term.powers.exp > 0);
      });
    });
  }

  // A product that sums the weights over the queries, as the gradient of the values does.
  int sum_over_queries() const {
    for (int node : products_) {
      for (size_t at : {size_t{0}, size_t{1}}) {
        const Seen* seen = flow_.find(net_.input(node, at));
        std::string reason;
        const bool is_straight = seen != nullptr && seen->order == Seen::kStraight;
        if (is_of_keys(seen) && weights_product(net_, node, net_.input(node, at), reason, is_straight)) return node;
      }
    }
    return kNone;
  }

  // `factor`: of the gradient of the weights, by the product of the output's and the values.
  Backward gather(const Operand& grad_out, double factor) {
    Backward& b = backward_;
    b.nodes = nodes_;
    b.nodes.push_back(start_);
    b.grad_out = grad_out;
    factor_ = factor * keep();
    for (int node : products_) {
      if (b.reason.empty()) take(node);
    }
    b.captures.resize(match_.program ? match_.program->captures.size() : 0, kNone);
    for (int node : strangers_) {
      for (size_t at = 0; at < net_.node(node).inputs.size(); ++at) take_summed(net_.input(node, at), node);
    }
    for (int node : nodes_) {
      if (net_.value(net_.output(node, 0)).is_output) take_summed(net_.output(node, 0), kNone);
    }
    if (b.reason.empty() && b.query.value == kNone && b.key.value == kNone) {
      const int node = first_stranger();
      b.reason = node == kNone ? sentence("no gradient of query or key follows from ", words_of(net_, start_))
                               : sentence(words_of(net_, node),
                                          " is no step from the gradient of the weights to that of the scores");
    }
    b.saved_bytes = saved_bytes().value_or(0);
    return std::move(b);
  }

 private:
  bool dropped() const { return static_cast<bool>(flow_.dropped()); }
  bool has_slopes() const { return match_.softcap > 0 || match_.program; }
  static bool is_of_keys(const Seen* seen) {
    return seen != nullptr && seen->full && seen->columns == Seen::kKeys && seen->order != Seen::kKeysFirst;
  }
  double keep() const { return flow_.dropped().keep(); }

  // That reads a gradient.
  int first_stranger() const {
    for (int node : strangers_) {
      for (size_t i = 0; i < net_.node(node).inputs.size(); ++i) {
        const Seen* seen = flow_.find(net_.input(node, i));
        if (seen != nullptr && has_gradient(seen->terms)) return node;
      }
    }
    return kNone;
  }

  // A product outside of the forward: the gradient of an operand.
  void take(int node) {
    const size_t side = flow_.find(net_.input(node, 0)) != nullptr ? 0 : 1;
    const int x = net_.input(node, side);
    const Seen& seen = *flow_.find(x);
    const bool of_weights = !has_gradient(seen.terms);
    auto times = ratio(seen.terms, of_weights ? flow_.weights() : scores_gradient_of(dropped(), has_slopes()));
    if (!times && slopes_.inverse) {
      times = ratio(seen.terms, scores_gradient_of(dropped(), false));
      if (times) *times *= *slopes_.inverse;
    }
    if (!times || !is_of_keys(&seen)) return refuse(node, " multiplies what is no gradient of these scores");
    std::string none;
    const auto over_keys = weights_product(net_, node, x, none, seen.order == Seen::kTransposed);
    const auto over_queries = weights_product(net_, node, x, none, seen.order == Seen::kStraight);
    const double scale = match_.scale * factor_;
    const bool taken =
        of_weights ? set(backward_.value, over_queries, backward_.grad_out, *times / (keep() * match_.out_factor))
                   : set(backward_.query, over_keys, match_.scores.right, *times / scale) ||
                         set(backward_.key, over_queries, match_.scores.left, *times / scale);
    if (taken) return;
    refuse(node, of_weights ? " multiplies the weights with what is not the gradient of the output"
                            : " multiplies the gradient of the scores with neither the query nor the key, or does so a "
                              "second time");
  }

  bool set(Gradient& gradient, const std::optional<Product>& product, const Operand& with, double times) {
    const auto like = product ? same_numbers(net_, product->right, with) : std::nullopt;
    if (!like || gradient.value != kNone) return false;
    gradient = {net_.output(product->node, 0), product->out, times * *like * product->factor};
    backward_.nodes.push_back(product->node);
    return true;
  }

  void refuse(int node, const char* why) { backward_.reason = words_of(net_, node) + why; }

  // A gradient of what broadcasts to the scores, for `reader`: of a sink, of a tensor of the program, or of the one mask that
  // is added.
  void take_summed(int x, int reader) {
    const Seen* seen = flow_.find(x);
    const bool is_straight = seen != nullptr && seen->full && seen->order == Seen::kStraight;
    const double times = is_straight ? ratio(seen->terms, scores_gradient_of(dropped(), false)).value_or(0)
                                     : 0;  // the gradient of the scores
    if (times != 0 && seen->columns == Seen::kSink && nearly(times, factor_))
      return (void)take_as(x, reader, match_.sinks->logits, backward_.sinks);
    for (const CaptureGradient& each : slopes_.captures) {
      const size_t i = each.capture;
      if (each.value == x && nearly(each.times, factor_) && backward_.captures[i] == kNone &&
          take_as(x, reader, match_.program->captures[i], backward_.captures[i]))
        return;
    }
    const MaskTerm* added = nullptr;
    for (const MaskTerm& term : match_.terms) {
      if (term.kind == MaskTerm::kAdded) added = added == nullptr ? &term : nullptr;
    }
    if (times != 0 && added != nullptr && seen->columns == Seen::kKeys && nearly(times, factor_ * added->number))
      take_as(x, reader, added->value, backward_.bias);
  }

  // As it is, or summed over the dims in which the operand is one.
  bool take_as(int x, int reader, int operand, int& gradient) {
    const auto shape = net_.shape(x), of_operand = net_.shape(operand);
    const bool sums = reader != kNone && reduced_as(reader, x, of_operand);
    const bool is_all = same_shape(shape, of_operand);
    const int found = sums ? net_.output(reader, 0) : is_all ? x : kNone;
    const bool is_taken = found == backward_.bias || found == backward_.sinks || contains(backward_.captures, found);
    if (found == kNone || gradient != kNone || is_taken) return gradient != kNone && gradient == found;
    gradient = found;
    if (sums && !contains(backward_.nodes, reader)) backward_.nodes.push_back(reader);
    return true;
  }

  bool reduced_as(int node, int x, std::span<const Size> operand) const {
    const auto shape = net_.shape(x);
    const auto axes = axes_of(net_, node);
    const auto scores = net_.shape(match_.softmax_input);
    if (!net_.is(node, "ReduceSum") || !axes || operand.size() > shape.size() || shape.size() != scores.size() ||
        !std::equal(shape.begin(), shape.end() - 1, scores.begin()))
      return false;
    for (size_t i = 0; i < shape.size(); ++i) {
      const bool sums =
          std::any_of(axes->begin(), axes->end(), [&](int64_t axis) { return axis_of(axis, shape.size()) == i; });
      const size_t ahead = shape.size() - operand.size();
      const bool is_one = i < ahead || operand[i - ahead].is(1);
      if (sums != is_one && !shape[i].is(1)) return false;
    }
    return true;
  }

  // What the backward reads of the forward, less what is kept in its place: a number for each row. Nothing where sizes
  // are not known.
  std::optional<int64_t> saved_bytes() const {
    const auto scores = net_.shape(match_.softmax_input);
    const Size rows = net_.symbols().product(Sizes(scores.begin(), scores.end() - (scores.empty() ? 0 : 1)));
    if (!rows.is_constant()) return std::nullopt;
    int64_t bytes = -4 * rows.factor;
    for (int node : match_.nodes) {
      for (size_t i = 0; i < net_.node(node).outputs.size() && !reshapes(net_, node); ++i) {
        const int id = net_.output(node, i);
        if (id == kNone || id == match_.out || !is_saved(id)) continue;
        const Size all = net_.symbols().product(Sizes(net_.shape(id).begin(), net_.shape(id).end()));
        if (!all.is_constant()) return std::nullopt;
        bytes += all.factor * element_bytes(net_.facts(id).type);
      }
    }
    return bytes;
  }

  // Whether the backward reads a value, or the same elements in other dims.
  bool is_saved(int id) const {
    for (std::vector<int> ids = {id}; !ids.empty();) {
      const std::vector<int>& users = net_.value(ids.back()).users;
      ids.pop_back();
      for (int user : users) {
        if (contains(backward_.nodes, user)) return true;
        if (reshapes(net_, user) && net_.output(user, 0) != kNone) ids.push_back(net_.output(user, 0));
      }
    }
    return false;
  }

  const Net& net_;
  const Match& match_;
  const Flow& flow_;
  int start_;
  Slopes slopes_;
  double factor_ = 1;
  std::vector<int> nodes_, products_, strangers_;
  Backward backward_;
};

bool is_read_elsewhere(const Net& net, const Match& match) {
  for (int node : match.nodes) {
    for (size_t i = 0; i < net.node(node).outputs.size(); ++i) {
      const int id = net.output(node, i);
      if (id == kNone || id == match.out) continue;
      for (int user : net.value(id).users) {
        if (!contains(match.nodes, user)) return true;
      }
    }
  }
  return false;
}

}  // namespace

std::optional<Backward> find_backward(const Net& net, const Match& match, Flow& forward) {
  constexpr int kMostTried = 64;
  if (!is_read_elsewhere(net, match)) return std::nullopt;
  for (const MaskTerm& term : match.terms) {
    if (term.kind != MaskTerm::kAdded) forward.tell(Choice(net, term.value, term.kind == MaskTerm::kVisible));
  }
  std::optional<Backward> failed;
  int tried = 0;
  for (int node = 0; node < static_cast<int>(net.graph().nodes.size()); ++node) {
    if (!is_product(net, node) || contains(match.nodes, node)) continue;
    std::string none;
    const auto product = scores_product(net, node, none);
    const auto values = product ? same_numbers(net, product->right, match.result.right) : std::nullopt;
    if (!values || ++tried > kMostTried) continue;
    Flow flow = forward;
    flow.tell(net.output(node, 0), {{Term{{}, 0, Term::kGradient}, 1}});
    Slopes slopes;
    if (match.softcap > 0 || match.program) slopes = tell_slopes(net, match, flow);
    Gatherer gatherer(net, match, flow, node, std::move(slopes));
    if (!gatherer.meets()) continue;
    Backward backward = gatherer.gather(product->left, match.out_factor / (*values * product->factor));
    if (backward.reason.empty()) return backward;
    if (!failed) failed = std::move(backward);
  }
  if (failed) return failed;
  const int sum = Gatherer(net, match, forward, kNone).sum_over_queries();
  if (sum == kNone) return std::nullopt;
  Backward broken;
  broken.reason = sentence("the weights are multiplied by ", words_of(net, sum),
                           " as for a gradient of the values, but their own gradient is not found");
  return broken;
}

}  // namespace polyhead::graph
