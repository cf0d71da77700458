// The backward of an attention: what its graph makes of the weights and of their gradient, node by node, as sums of
// products, until these are multiplied with the operands again.
#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "core/sentence.h"
#include "graph/layout.h"
#include "graph/match.h"
#include "graph/same.h"
#include "graph/tensors.h"
#include "graph/terms.h"

namespace polyhead::graph {
namespace {

bool contains(const std::vector<int>& nodes, int node) {
  return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
}

// What is known of a value that has the scores' dims, or one number for each row of them.
struct Seen {
  Terms terms;
  bool transposed = false;  // [lead..., keys, rows]
  bool full = true;         // false: one number for each row, in dims of any kind
};

class Scan {
 public:
  // `start`: the product that gives the gradient of the weights, or kNone.
  Scan(const Net& net, const Match& match, int start) : net_(net), match_(match), start_(start) {
    dropped_ = match.dropout_p > 0;
    keep_ = dropped_ ? 1 / (1 - match.dropout_p) : 1;
    for (const MaskTerm& term : match.terms) {
      if (term.kind != MaskTerm::kAdded) choices_.push_back(Choice(net, term.value, term.kind == MaskTerm::kVisible));
    }
    if (match.exponentials != kNone) {
      seen_[match.exponentials] = {{{Term{{1, 0, 0}}, 1}}};
    } else {
      seen_[match.softmax_output] = {weights_of(false)};
    }
    for (int node : match.nodes) {
      if (match.softcap > 0 && net.is(node, "Tanh")) seen_[net.output(node, 0)] = {{{Term{{0, 0, 1}}, 1}}};
    }
    if (start != kNone) seen_[net.output(start, 0)] = {{{Term{{}, 0, Term::kGradient}, 1}}};
  }

  void run() {
    const auto count = static_cast<int>(net_.graph().nodes.size());
    for (int node = 0; node < count; ++node) visit(node);
  }

  // Whether the weights and their gradient meet.
  bool meets() const {
    return std::any_of(seen_.begin(), seen_.end(), [](const auto& each) {
      return std::any_of(each.second.terms.begin(), each.second.terms.end(), [](const auto& term) {
        return term.first.kind != Term::kPlain && (term.first.powers.exp > 0 || term.first.kind == Term::kRowSum);
      });
    });
  }

  // A product that sums the weights over the queries, as the gradient of the values does.
  int sum_over_queries() const {
    for (int node : products_) {
      for (size_t at : {size_t{0}, size_t{1}}) {
        const Seen* seen = find(net_.input(node, at));
        std::string reason;
        if (seen != nullptr && weights_product(net_, node, net_.input(node, at), reason, !seen->transposed))
          return node;
      }
    }
    return kNone;
  }

  Backward gather(const Operand& grad_out, double factor) {
    Backward& b = backward_;
    b.nodes = nodes_;
    if (start_ != kNone) b.nodes.push_back(start_);
    b.grad_out = grad_out;
    factor_ = factor * keep_;
    for (int node : products_) {
      if (b.reason.empty()) take(node);
    }
    for (int node : strangers_) {
      for (size_t at = 0; at < net_.node(node).inputs.size(); ++at) take_bias(net_.input(node, at), node);
    }
    for (int node : nodes_) {
      if (net_.value(net_.output(node, 0)).is_output) take_bias(net_.output(node, 0), kNone);
    }
    if (b.reason.empty() && b.query.value == kNone && b.key.value == kNone) {
      const int node = first_stranger();
      b.reason = node == kNone ? sentence("no gradient of query or key follows from ", words_of(net_, start_))
                               : sentence(words_of(net_, node),
                                          " is no step from the gradient of the weights to that of the scores");
    }
    // What is kept in their place is a number for each row.
    const auto scores = net_.shape(match_.softmax_input);
    const Size rows = net_.symbols().product(Sizes(scores.begin(), scores.end() - (scores.empty() ? 0 : 1)));
    b.saved_bytes = rows.is_constant() ? -4 * rows.factor : 0;
    for (int node : match_.nodes) {
      const auto saved = saved_of(node);
      if (!saved || !rows.is_constant()) b.saved_bytes = 0;
      if (!saved || !rows.is_constant()) break;
      b.saved_bytes += *saved;
    }
    return std::move(b);
  }

 private:
  const Seen* find(int id) const {
    const auto at = seen_.find(id);
    return at == seen_.end() ? nullptr : &at->second;
  }

  void visit(int node) {
    bool reads = false;
    for (size_t i = 0; i < net_.node(node).inputs.size(); ++i) reads = reads || find(net_.input(node, i)) != nullptr;
    const int output = net_.output(node, 0);
    if (!reads || node == start_ || find(output) != nullptr) return;
    const bool of_forward = contains(match_.nodes, node);
    if (is_product(net_, node)) {
      if (!of_forward) products_.push_back(node);
      return;
    }
    if (auto result = evaluate(node, of_forward); result && output != kNone) {
      seen_[output] = std::move(*result);
      if (!of_forward) nodes_.push_back(node);
    } else if (!of_forward) {
      strangers_.push_back(node);
    }
  }

  std::optional<Seen> evaluate(int node, bool of_forward) {
    const std::string& op = net_.node(node).op_type;
    if (net_.node(node).domain == "com.microsoft") return of_microsoft(node);
    if (!net_.node(node).domain.empty()) return std::nullopt;
    if (op == "Mul" || op == "Div" || op == "Add" || op == "Sub" || op == "Sum") return of_two(node);
    if (op == "Where") return of_where(node, of_forward);
    if (op == "ReduceSum") return of_sum(node);
    const Seen* x = find(net_.input(node, 0));
    if (x == nullptr) return std::nullopt;
    if (op == "Identity" || op == "Cast") return *x;
    if (op == "Neg") return with(*x, product(x->terms, number_of(-1)));
    if (op == "Reciprocal") return with(*x, power(x->terms, -1));
    if (op == "Pow") {
      const auto exponent = net_.number(net_.input(node, 1));
      const bool is_small = exponent && std::fabs(*exponent) <= 2 && *exponent == std::round(*exponent);
      return is_small ? with(*x, power(x->terms, static_cast<int>(*exponent))) : std::nullopt;
    }
    if (op == "Dropout" && of_forward && dropped_) {
      seen_[net_.output(node, 1)] = {{{Term{{0, 1, 0}}, 1}}};
      return with(*x, product(x->terms, {{Term{{0, 1, 0}}, keep_}}));
    }
    return of_dims(node, *x);
  }

  // That reads a gradient.
  int first_stranger() const {
    for (int node : strangers_) {
      for (size_t i = 0; i < net_.node(node).inputs.size(); ++i) {
        const Seen* seen = find(net_.input(node, i));
        if (seen != nullptr && has_gradient(seen->terms)) return node;
      }
    }
    return kNone;
  }

  static std::optional<Seen> with(const Seen& like, std::optional<Terms> terms) {
    return terms ? std::optional(Seen{std::move(*terms), like.transposed, like.full}) : std::nullopt;
  }

  // Nodes that move elements.
  std::optional<Seen> of_dims(int node, const Seen& x) const {
    const auto before = net_.shape(net_.input(node, 0)), after = net_.shape(net_.output(node, 0));
    if (before.empty() || after.empty()) return std::nullopt;
    const size_t rank = before.size();
    if (net_.is(node, "Reshape") || net_.is(node, "Squeeze") || net_.is(node, "Unsqueeze")) {
      const bool kept = rank >= 2 && after.size() >= 2 && before[rank - 1] == after.back() &&
                        before[rank - 2] == after[after.size() - 2];
      return kept || !x.full ? std::optional(x) : std::nullopt;
    }
    if (net_.is(node, "Expand")) {
      if (std::equal(before.begin(), before.end(), after.begin(), after.end())) return x;
      if (x.full || !spans(before, after)) return std::nullopt;
      return Seen{x.terms, false, true};
    }
    const Attribute* perm = attribute_of(net_.node(node), "perm");
    if (!net_.is(node, "Transpose") || perm == nullptr || perm->integers.size() != rank || !x.full || rank < 2)
      return std::nullopt;
    for (size_t i = 0; i < rank; ++i) {
      const size_t from = i + 2 < rank ? i : 2 * rank - 3 - i;
      if (perm->integers[i] != static_cast<int64_t>(from)) return std::nullopt;
    }
    return Seen{x.terms, !x.transposed, true};
  }

  // Whether a number for each row lies so that it is there for all of the row's keys.
  static bool spans(std::span<const Size> row, std::span<const Size> full) {
    return row.size() == full.size() && !row.empty() && row.back().is(1) &&
           std::equal(row.begin(), row.end() - 1, full.begin());
  }

  std::optional<Seen> of_two(int node) const {
    const std::string& op = net_.node(node).op_type;
    const auto shape = net_.shape(net_.output(node, 0));
    if (net_.node(node).inputs.size() != 2 || shape.empty()) return std::nullopt;
    Terms terms[2];
    bool full = false, transposed[2] = {};
    for (size_t i = 0; i < 2; ++i) {
      const int id = net_.input(node, i);
      const Seen* x = find(id);
      if (x == nullptr) {
        const auto number = net_.number(id);
        if (!number || !std::isfinite(*number)) return std::nullopt;
        terms[i] = number_of(*number);
        continue;
      }
      terms[i] = x->terms;
      const auto mine = net_.shape(id);
      const bool as_is = std::equal(mine.begin(), mine.end(), shape.begin(), shape.end());
      if (!as_is && (x->full || !spans(mine, shape))) return std::nullopt;
      full = full || x->full;
      transposed[i] = x->transposed;
    }
    // Beside a transposed value nothing else stands but a number.
    if ((transposed[0] || transposed[1]) && find(net_.input(node, 0)) != nullptr &&
        find(net_.input(node, 1)) != nullptr)
      return std::nullopt;
    const Seen like = {{}, transposed[0] || transposed[1], full};
    if (op == "Mul") return with(like, product(terms[0], terms[1]));
    if (op == "Add" || op == "Sum") return with(like, sum(terms[0], terms[1], 1));
    if (op == "Sub") return with(like, sum(terms[0], terms[1], -1));
    const auto inverse = power(terms[1], -1);
    return inverse ? with(like, product(terms[0], *inverse)) : std::nullopt;
  }

  std::optional<Seen> of_sum(int node) const {
    const int id = net_.input(node, 0);
    const Seen* x = find(id);
    const auto axes = axes_of(net_, node);
    const int last = net_.rank(id) - 1;
    if (x == nullptr || x->transposed || !axes || axes->size() != 1) return std::nullopt;
    if (axes->front() != -1 && axes->front() != last) return std::nullopt;
    if (!x->full) return net_.shape(id).back().is(1) ? std::optional(*x) : std::nullopt;
    return with({{}, false, false}, row_sum(x->terms));
  }

  // Where nothing is seen, a zero: the mask's own, for there the weights are zero too; a guard's; or dropout's.
  std::optional<Seen> of_where(int node, bool of_forward) {
    const size_t side = find(net_.input(node, 1)) != nullptr ? 1 : 2;
    const Seen* x = find(net_.input(node, side));
    if (x == nullptr) return std::nullopt;
    const Choice choice(net_, net_.input(node, 0), side == 1);
    if (of_forward) {
      choices_.push_back(choice);
      return *x;
    }
    const auto shape = net_.shape(net_.output(node, 0)), mine = net_.shape(net_.input(node, side));
    if (net_.number(net_.input(node, 3 - side)) != 0.0 ||
        !std::equal(shape.begin(), shape.end(), mine.begin(), mine.end()))
      return std::nullopt;
    for (const Choice& known : choices_) {
      if (known.visible == choice.visible && same_value(net_, known.value, choice.value)) return *x;
    }
    const Seen* kept = find(net_.input(node, 0));
    return kept != nullptr && side == 1 ? with(*x, product(x->terms, kept->terms)) : std::nullopt;
  }

  // SoftmaxGrad(dP, P) and DropoutGrad(dP, mask, ratio) of ONNX Runtime's training.
  std::optional<Seen> of_microsoft(int node) const {
    const std::string& op = net_.node(node).op_type;
    const Seen *x = find(net_.input(node, 0)), *y = find(net_.input(node, 1));
    if (x == nullptr || y == nullptr || x->transposed || y->transposed) return std::nullopt;
    const auto both = product(x->terms, y->terms);
    if (!both) return std::nullopt;
    if (op == "DropoutGrad" && dropped_ && net_.number(net_.input(node, 2)) == match_.dropout_p)
      return with(*x, product(*both, number_of(keep_)));
    const int64_t axis = integer_of(net_.node(node), "axis", -1);
    if (!op.starts_with("SoftmaxGrad") || (axis != -1 && axis != net_.rank(net_.input(node, 0)) - 1))
      return std::nullopt;
    const auto sums = row_sum(*both);
    const auto taken = sums ? product(*sums, y->terms) : std::nullopt;
    return taken ? with(*x, sum(*both, *taken, -1)) : std::nullopt;
  }

  // A product outside of the forward: the gradient of an operand.
  void take(int node) {
    for (size_t at : {size_t{0}, size_t{1}}) {
      const int x = net_.input(node, at);
      const Seen* seen = find(x);
      if (seen == nullptr) continue;
      const bool of_weights = !has_gradient(seen->terms);
      const Terms wanted = of_weights ? weights_of(dropped_) : scores_gradient_of(dropped_, match_.softcap > 0);
      const auto times = ratio(seen->terms, wanted);
      if (!times) return refuse(node, " multiplies what is no gradient of these scores");
      std::string none;
      const auto over_keys = weights_product(net_, node, x, none, seen->transposed);
      const auto over_queries = weights_product(net_, node, x, none, !seen->transposed);
      const double scale = match_.scale * factor_;
      if (of_weights && over_queries) {
        if (set(backward_.value, *over_queries, backward_.grad_out, *times / (keep_ * match_.out_factor))) return;
      } else if (!of_weights) {
        if (over_keys && set(backward_.query, *over_keys, match_.scores.right, *times / scale)) return;
        if (over_queries && set(backward_.key, *over_queries, match_.scores.left, *times / scale)) return;
      }
      return refuse(node, of_weights ? " multiplies the weights with what is not the gradient of the output"
                                     : " multiplies the gradient of the scores with neither the query nor the key, or "
                                       "does so a second time");
    }
  }

  bool set(Gradient& gradient, const Product& product, const Operand& with, double times) {
    const auto like = same_numbers(net_, product.right, with);
    if (!like || gradient.value != kNone) return false;
    gradient = {net_.output(product.node, 0), product.out, times * *like * product.factor};
    backward_.nodes.push_back(product.node);
    return true;
  }

  void refuse(int node, const char* why) { backward_.reason = words_of(net_, node) + why; }

  // The gradient of the scores behind the softmax, for `reader`, as it is or summed over the dims in which the added mask
  // is one.
  void take_bias(int x, int reader) {
    const Seen* seen = find(x);
    if (seen == nullptr || seen->transposed || !seen->full) return;
    const auto times = ratio(seen->terms, scores_gradient_of(dropped_, false));
    const MaskTerm* added = nullptr;
    for (const MaskTerm& term : match_.terms) {
      if (term.kind == MaskTerm::kAdded) added = added == nullptr ? &term : nullptr;
    }
    if (!times || added == nullptr || !nearly(*times, factor_ * added->number)) return;
    const bool sums = reader != kNone && reduced_as(reader, x, *added);
    const int bias = sums ? net_.output(reader, 0) : is_all(x, *added) ? x : kNone;
    if (bias == kNone || (backward_.bias != kNone && backward_.bias != bias)) return;
    backward_.bias = bias;
    if (sums) backward_.nodes.push_back(reader);
  }

  bool is_all(int x, const MaskTerm& term) const {
    const auto shape = net_.shape(x), mask = net_.shape(term.value);
    return std::equal(shape.begin(), shape.end(), mask.begin(), mask.end());
  }

  bool reduced_as(int node, int x, const MaskTerm& term) const {
    const auto shape = net_.shape(x), mask = net_.shape(term.value);
    const auto axes = axes_of(net_, node);
    if (!net_.is(node, "ReduceSum") || !axes || mask.size() > shape.size() || shape.size() != term.rank_of_scores)
      return false;
    for (size_t i = 0; i < shape.size(); ++i) {
      const bool sums =
          std::any_of(axes->begin(), axes->end(), [&](int64_t axis) { return axis_of(axis, shape.size()) == i; });
      const size_t ahead = shape.size() - mask.size();
      const bool is_one = i < ahead || mask[i - ahead].is(1);
      if (sums != is_one && !shape[i].is(1)) return false;
    }
    return true;
  }

  // Whether the backward reads a value, or the same elements in other dims.
  bool is_saved(int id) const {
    for (std::vector<int> ids = {id}; !ids.empty();) {
      const std::vector<int>& users = net_.value(ids.back()).users;
      ids.pop_back();
      for (int user : users) {
        if (contains(backward_.nodes, user)) return true;
        if (Layout::moves(net_, user) && net_.output(user, 0) != kNone) ids.push_back(net_.output(user, 0));
      }
    }
    return false;
  }

  // What the backward reads of a forward's node, where its size is a number.
  std::optional<int64_t> saved_of(int node) const {
    int64_t bytes = 0;
    for (size_t i = 0; i < net_.node(node).outputs.size() && !Layout::moves(net_, node); ++i) {
      const int id = net_.output(node, i);
      if (id == kNone || id == match_.out || !is_saved(id)) continue;
      const Size all = net_.symbols().product(Sizes(net_.shape(id).begin(), net_.shape(id).end()));
      if (!all.is_constant()) return {};
      bytes += all.factor * element_bytes(net_.facts(id).type);
    }
    return bytes;
  }

  const Net& net_;
  const Match& match_;
  int start_;
  bool dropped_ = false;
  double keep_ = 1, factor_ = 1;
  std::unordered_map<int, Seen> seen_;
  std::vector<Choice> choices_;  // that leave the weights as they are
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

std::optional<Backward> find_backward(const Net& net, const Match& match) {
  constexpr int kMostTried = 64;
  if (!is_read_elsewhere(net, match)) return std::nullopt;
  std::optional<Backward> failed;
  int tried = 0;
  for (int node = 0; node < static_cast<int>(net.graph().nodes.size()); ++node) {
    if (!is_product(net, node) || contains(match.nodes, node)) continue;
    std::string none;
    const auto product = scores_product(net, node, none);
    const auto values = product ? same_numbers(net, product->right, match.result.right) : std::nullopt;
    if (!values || ++tried > kMostTried) continue;
    Scan scan(net, match, node);
    scan.run();
    if (!scan.meets()) continue;
    Backward backward = scan.gather(product->left, match.out_factor / (*values * product->factor));
    if (backward.reason.empty()) return backward;
    if (!failed) failed = std::move(backward);
  }
  if (failed) return failed;
  Scan scan(net, match, kNone);
  scan.run();
  const int sum = scan.sum_over_queries();
  if (sum == kNone) return std::nullopt;
  Backward broken;
  broken.reason = sentence("the weights are multiplied by ", words_of(net, sum),
                           " as for a gradient of the values, but their own gradient is not found");
  return broken;
}

}  // namespace polyhead::graph
