#include "graph/flow.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "graph/affine.h"
#include "graph/nodes.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

// Whether a number for each row lies so that it is there for all of the row's keys.
bool spans(std::span<const Size> row, std::span<const Size> full) {
  return row.size() == full.size() && !row.empty() && row.back().is(1) &&
         std::equal(row.begin(), row.end() - 1, full.begin());
}

std::optional<Seen> with(const Seen& like, std::optional<Terms> terms) {
  return terms ? std::optional(Seen{std::move(*terms), like.order, like.full, like.columns}) : std::nullopt;
}

// What a boolean tells of the rows of the scores, read from where it is computed.
class RowReader {
 public:
  enum Told {
    kNothing,
    kHidden,      // of each score: it is -inf
    kVisible,     // of each score: it is not
    kAllHidden,   // of each row
    kAnyVisible,  // of each row
  };

  RowReader(const Net& net, int scores) : net_(net), scores_(scores) {}

  Told read(int id, int depth = 0) {
    constexpr int kMostDepth = 12;
    const int node = net_.producer(id);
    if (node == kNone || depth > kMostDepth) return kNothing;
    const int x = net_.input(node, 0);
    if (net_.is(node, "Equal")) return equal(node);
    if (net_.is(node, "Cast")) return read(x, depth + 1);
    if (net_.is(node, "Not")) return negated(read(x, depth + 1));
    const bool maximum = net_.is(node, "ReduceMax"), minimum = net_.is(node, "ReduceMin");
    if ((!maximum && !minimum) || !keeps_rows(node)) return kNothing;
    const Told each = read(x, depth + 1);
    if (maximum && each == kVisible) return kAnyVisible;
    return minimum && each == kHidden ? kAllHidden : kNothing;
  }

  int mask = kNone;  // of which it was told; whether it is one is seen when all masks are known

 private:
  bool keeps_rows(int node) const {
    return reduces_last(net_, node) && integer_of(net_.node(node), "keepdims", 1) != 0;
  }

  Told equal(int node) {
    const auto number = net_.number(net_.input(node, 1));
    if (!number || !std::isinf(*number) || *number > 0) return kNothing;
    if (net_.input(node, 0) == scores_) return kHidden;
    const int maximum = net_.producer(net_.input(node, 0));
    if (!net_.is(maximum, "ReduceMax") || !keeps_rows(maximum)) return kNothing;
    mask = net_.input(maximum, 0);
    return kAllHidden;
  }

  static Told negated(Told told) {
    switch (told) {
      case kHidden: return kVisible;
      case kVisible: return kHidden;
      case kAllHidden: return kAnyVisible;
      case kAnyVisible: return kAllHidden;
      default: return kNothing;
    }
  }

  const Net& net_;
  int scores_;
};

}  // namespace

const Seen* Flow::find(int value) const {
  const auto at = seen_.find(value);
  return at == seen_.end() ? nullptr : &at->second;
}

void Flow::add(int value, Seen seen) {
  if (value == kNone || !seen_.emplace(value, std::move(seen)).second) return;
  const std::vector<int>& users = net_.value(value).users;
  readers_.insert(users.begin(), users.end());
  todo_.insert(users.begin(), users.end());
}

void Flow::run() {
  while (!todo_.empty()) {
    const int node = *todo_.begin();
    todo_.erase(todo_.begin());
    const int output = net_.output(node, 0);
    if (output == kNone || find(output) != nullptr) continue;
    if (auto seen = evaluate(node)) add(output, std::move(*seen));
  }
}

std::optional<Seen> Flow::evaluate(int node) {
  const std::string& op = net_.node(node).op_type;
  if (net_.node(node).domain == "com.microsoft") return of_microsoft(node);
  if (!net_.node(node).domain.empty()) return std::nullopt;
  if (lists(" Mul Div Add Sub Sum ", op)) return of_two(node);
  if (op == "Where") return of_where(node);
  if (op == "ReduceSum") return of_sum(node);
  if (lists(" Pad Concat ScatterElements ScatterND ", op)) return of_zeros(node);
  const Seen* x = find(net_.input(node, 0));
  if (x == nullptr) return std::nullopt;
  if (op == "Identity" || (op == "Cast" && is_float(net_.facts(net_.output(node, 0)).type))) return *x;
  if (op == "Neg") return with(*x, product(x->terms, number_of(-1)));
  if (op == "Reciprocal") return with(*x, power(x->terms, -1));
  if (op == "Pow") {
    const auto exponent = net_.number(net_.input(node, 1));
    const bool is_small = exponent && std::fabs(*exponent) <= 2 && *exponent == std::round(*exponent);
    return is_small ? with(*x, power(x->terms, static_cast<int>(*exponent))) : std::nullopt;
  }
  if (op == "Dropout") return of_dropout(node, *x);
  return of_dims(node, *x);
}

std::optional<Seen> Flow::of_dropout(int node, const Seen& x) {
  const int mask = net_.output(node, 1);
  if (is_idle_dropout(net_, node)) {
    return mask == kNone || net_.value(mask).users.empty() ? std::optional(x) : std::nullopt;
  }
  const auto p = net_.input(node, 1) == kNone ? std::optional(0.5) : net_.number(net_.input(node, 1));
  if (backwards_ == Backwards::kOfNobody || net_.number(net_.input(node, 2)) != 1.0 || dropped_ || !p ||
      !(*p > 0 && *p < 1) || has_gradient(x.terms))
    return std::nullopt;
  dropped_ = {node, *p};
  add(mask, {{{Term{{0, 1, 0}}, 1}}});
  return with(x, product(x.terms, {{Term{{0, 1, 0}}, dropped_.keep()}}));
}

// Nodes that move elements.
std::optional<Seen> Flow::of_dims(int node, const Seen& x) const {
  const auto before = net_.shape(net_.input(node, 0)), after = net_.shape(net_.output(node, 0));
  const size_t rank = before.size();
  if (before.empty() || after.empty()) return std::nullopt;
  if (reshapes(net_, node))
    return !x.full || (keeps_matrix(net_, node) && x.order != Seen::kKeysFirst) ? std::optional(x) : std::nullopt;
  if (net_.is(node, "Expand")) {
    if (same_shape(before, after)) return x;
    return !x.full && spans(before, after) ? std::optional(Seen{x.terms}) : std::nullopt;
  }
  if (net_.is(node, "Slice")) return of_slice(node, x);
  const auto perm = net_.is(node, "Transpose") ? perm_of(net_, node, rank) : std::nullopt;
  if (!perm || !x.full || rank < 2) return std::nullopt;
  for (const auto order : {Seen::kTransposed, Seen::kKeysFirst}) {
    std::vector<size_t> swapped(rank);
    std::iota(swapped.begin(), swapped.end(), size_t{0});
    std::swap(swapped[order == Seen::kTransposed ? rank - 2 : 0], swapped.back());
    if (*perm != swapped || (x.order != order && x.order != Seen::kStraight)) continue;
    return Seen{x.terms, x.order == order ? Seen::kStraight : order, true, x.columns};
  }
  return std::nullopt;
}

std::optional<Seen> Flow::of_two(int node) const {
  const std::string& op = net_.node(node).op_type;
  const auto shape = net_.shape(net_.output(node, 0));
  if (net_.node(node).inputs.size() != 2 || shape.empty()) return std::nullopt;
  Terms terms[2];
  Seen like = {{}, Seen::kStraight, false};
  int num_seen = 0;
  for (size_t i = 0; i < 2; ++i) {
    const int id = net_.input(node, i);
    const Seen* x = find(id);
    if (x == nullptr) {
      const auto number = net_.number(id);
      if (!number || !std::isfinite(*number)) return std::nullopt;
      terms[i] = number_of(*number);
      continue;
    }
    if (!same_shape(net_.shape(id), shape) && (x->full || !spans(net_.shape(id), shape))) return std::nullopt;
    terms[i] = x->terms;
    if (x->full && like.full && x->columns != like.columns) return std::nullopt;
    if (x->full) like.columns = x->columns;
    like.full = like.full || x->full;
    if (x->order != Seen::kStraight) like.order = x->order;
    ++num_seen;
  }
  if (like.order != Seen::kStraight && num_seen == 2)
    return std::nullopt;  // beside it nothing else stands but a number
  if (op == "Mul") return with(like, product(terms[0], terms[1]));
  if (op == "Add" || op == "Sum") return with(like, sum(terms[0], terms[1], 1));
  if (op == "Sub") return with(like, sum(terms[0], terms[1], -1));
  const auto inverse = power(terms[1], -1);
  return inverse ? with(like, product(terms[0], *inverse)) : std::nullopt;
}

std::optional<Seen> Flow::of_sum(int node) const {
  const Seen* x = find(net_.input(node, 0));
  if (x == nullptr || x->order != Seen::kStraight || !reduces_last(net_, node)) return std::nullopt;
  const auto shape = net_.shape(net_.input(node, 0));
  if (!x->full) return !shape.empty() && shape.back().is(1) ? std::optional(*x) : std::nullopt;
  return with({{}, Seen::kStraight, false}, sum_over_keys(x->terms, x->columns));
}

// Without their sink exponentials do not sum to z; what has dP in it has the same sum without it.
std::optional<Terms> Flow::sum_over_keys(const Terms& terms, Seen::Columns columns) const {
  const bool is_whole =
      columns == Seen::kJoined || !sinks_ ||
      std::all_of(terms.begin(), terms.end(), [](const auto& each) { return each.first.kind == Term::kGradient; });
  return is_whole && columns != Seen::kSink ? row_sum(terms) : std::nullopt;
}

// The keys of joined scores, or their sink.
std::optional<Seen> Flow::of_slice(int node, const Seen& x) const {
  if (!sinks_ || x.columns != Seen::kJoined || x.order != Seen::kStraight || !x.full) return std::nullopt;
  const auto starts = slice_starts(net_, node);
  const auto scores = net_.shape(sinks_->scores), left = net_.shape(net_.output(node, 0));
  if (!starts || left.size() != scores.size() || !std::equal(left.begin(), left.end() - 1, scores.begin()) ||
      !std::all_of(starts->begin(), starts->end() - 1, [](const Size& start) { return start.is(0); }))
    return std::nullopt;
  const Size from_behind = sinks_->is_ahead ? Size{0, {}} : scores.back();
  if (starts->back().is(sinks_->is_ahead ? 1 : 0) && left.back() == scores.back())
    return Seen{x.terms, Seen::kStraight, true, Seen::kKeys};
  return starts->back() == from_behind && left.back().is(1)
             ? std::optional(Seen{x.terms, Seen::kStraight, true, Seen::kSink})
             : std::nullopt;
}

// Zeros among zeros; and what has a zero where a sink was joined.
std::optional<Seen> Flow::of_zeros(int node) const {
  const auto shape = net_.shape(net_.output(node, 0));
  if (net_.is(node, "ScatterElements")) {
    const Seen* zero = find(net_.input(node, 2));
    const bool is_joined = sinks_ && same_shape(shape, net_.shape(sinks_->joined));
    const bool is_zero = zero != nullptr && zero->terms.empty() && net_.number(net_.input(node, 0)) == 0.0;
    if (!is_zero || !(is_joined || same_shape(shape, net_.shape(scores_)))) return std::nullopt;
    return Seen{{}, Seen::kStraight, true, is_joined ? Seen::kJoined : Seen::kKeys};
  }
  const auto padded = sinks_ ? padded_by(net_, node, *sinks_) : std::nullopt;
  const Seen* x = padded ? find(padded->value) : nullptr;
  const bool is_zero_of_sink = x != nullptr && x->full && x->columns == Seen::kKeys &&
                               x->order == (padded->keys_first ? Seen::kKeysFirst : Seen::kStraight) &&
                               std::all_of(x->terms.begin(), x->terms.end(),
                                           [](const auto& each) { return each.first.kind == Term::kGradient; });
  return is_zero_of_sink ? std::optional(Seen{x->terms, x->order, true, Seen::kJoined}) : std::nullopt;
}

// A zero where nothing is seen: the mask's own, for there the weights are zero too; a guard's; or dropout's.
std::optional<Seen> Flow::of_where(int node) {
  const size_t side = find(net_.input(node, 1)) != nullptr ? 1 : 2;
  const int condition = net_.input(node, 0);
  const Seen* x = find(net_.input(node, side));
  if (x == nullptr || net_.number(net_.input(node, 3 - side)) != 0.0) return std::nullopt;
  const Choice choice(net_, condition, side == 1);
  if (x->order == Seen::kStraight && x->full && x->columns == Seen::kKeys && ratio(x->terms, weights()) &&
      guards(node, side)) {
    choices_.push_back(choice);
    return *x;
  }
  if (!same_shape(net_.shape(net_.output(node, 0)), net_.shape(net_.input(node, side)))) return std::nullopt;
  for (const Choice& known : choices_) {
    const bool is_of_keys = x->columns == Seen::kKeys || !x->full;
    if (is_of_keys && known.visible == choice.visible && same_value(net_, known.value, choice.value)) return *x;
  }
  const Seen* kept = find(condition);
  return kept != nullptr && side == 1 ? with(*x, product(x->terms, kept->terms)) : std::nullopt;
}

// where(row sees nothing, 0, weights), told by NaN of the weights or by the scores.
bool Flow::guards(int node, size_t side) {
  const int condition = net_.producer(net_.input(node, 0));
  RowReader rows(net_, scores_);
  bool found = net_.is(condition, "IsNaN") && net_.input(condition, 0) == net_.input(node, side) && side == 2;
  if (!found) found = rows.read(net_.input(node, 0)) == (side == 1 ? RowReader::kAnyVisible : RowReader::kAllHidden);
  if (found) guards_[node] = rows.mask;
  return found;
}

// SoftmaxGrad(dP, P) and DropoutGrad(dP, mask, ratio) of ONNX Runtime's training.
std::optional<Seen> Flow::of_microsoft(int node) const {
  const std::string& op = net_.node(node).op_type;
  const Seen *x = find(net_.input(node, 0)), *y = find(net_.input(node, 1));
  if (x == nullptr || y == nullptr || x->order != Seen::kStraight || y->order != Seen::kStraight) return std::nullopt;
  const auto both = product(x->terms, y->terms);
  if (!both) return std::nullopt;
  if (op == "DropoutGrad" && dropped_ && net_.number(net_.input(node, 2)) == dropped_.p)
    return with(*x, product(*both, number_of(dropped_.keep())));
  const int64_t axis = integer_of(net_.node(node), "axis", -1);
  if (!op.starts_with("SoftmaxGrad") || (axis != -1 && axis != net_.rank(net_.input(node, 0)) - 1)) return std::nullopt;
  const auto sums = sum_over_keys(*both, x->columns);
  const auto taken = sums ? product(*sums, y->terms) : std::nullopt;
  return taken ? with(*x, sum(*both, *taken, -1)) : std::nullopt;
}

}  // namespace polyhead::graph
