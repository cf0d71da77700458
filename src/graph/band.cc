#include "graph/band.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "graph/affine.h"
#include "graph/nodes.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

constexpr int kMostSteps = 500;
constexpr double kHides = -1e4;

// The narrower of two bounds; nothing, and `open` stays false, where that cannot be told.
bool narrow(std::optional<Size>& bound, const std::optional<Size>& other, bool is_upper) {
  if (!other || bound == other) return true;
  if (bound && !(bound->is_constant() && other->is_constant())) return false;
  if (!bound || (is_upper ? other->factor < bound->factor : other->factor > bound->factor)) bound = other;
  return true;
}

bool unite(Shown& shown, const Shown& other) {
  if (!narrow(shown.lower, other.lower, false) || !narrow(shown.upper, other.upper, true)) return false;
  shown.rest.insert(shown.rest.end(), other.rest.begin(), other.rest.end());
  return true;
}

class Reader {
 public:
  // What an element does to its score: 0 shows it, any other number hides it.
  using Effect = std::function<double(double)>;

  // `steps` counts those of all branches together.
  Reader(const Net& net, const Size& num_queries, const Size& num_keys, int& steps)
      : net_(net), num_queries_(num_queries), num_keys_(num_keys), steps_(steps) {}

  // Of a value of two numbers, one of which shows scores. Whatever it is computed of is asked for its effect in turn.
  std::optional<Hiding> read(int id, const Effect& effect) const {
    const int node = net_.producer(id);
    if (const auto number = net_.number(id); number && effect(*number) == 0) return Hiding{};
    if (++steps_ > kMostSteps) return std::nullopt;
    if (facts(id).type == ElementType::kBool) return chosen(id, effect(1), effect(0));
    if (const Constant* constant = facts(id).constant) return of_constant(id, *constant, effect);
    if (is(node, "Where")) {
      const auto yes = net_.number(net_.input(node, 1)), no = net_.number(net_.input(node, 2));
      return yes && no ? chosen(net_.input(node, 0), effect(*yes), effect(*no)) : std::nullopt;
    }
    if (is(node, "Trilu")) return of_triangle(node, id, effect);
    if (is(node, "Slice")) return of_slice(node, id, effect);
    if (is(node, "Mul") || is(node, "Add") || is(node, "Sub")) return of_number(node, effect);
    return passes(node, id) ? read(net_.input(node, 0), effect) : std::nullopt;
  }

  // Where a boolean, or its negation, is true. What is not understood is a part of the rest: in the end the value itself.
  Shown shown(int id, bool negated) const {
    if (const auto told = net_.number(id); told && (*told != 0) != negated) return {};  // it hides nothing
    auto found = ++steps_ > kMostSteps ? std::nullopt : understood(id, negated);
    return found ? *found : Shown{{}, {}, {{id, negated}}};
  }

 private:
  const Facts& facts(int id) const {
    static const Facts nothing;
    return id == kNone ? nothing : net_.facts(id);
  }

  bool is(int node, const char* op_type) const { return net_.is(node, op_type); }

  // A value whose last two dims are those of the scores: elsewhere it is broadcast, and places mean something else.
  bool spans(int id) const {
    const auto shape = net_.shape(id);
    return shape.size() >= 2 && shape.back() == num_keys_ && shape[shape.size() - 2] == num_queries_;
  }

  // Nodes whose result, broadcast to the scores, is what their input is.
  bool passes(int node, int id) const {
    if (is(node, "Identity") || is(node, "Expand") || is(node, "Cast")) return true;
    if (!reshapes(net_, node)) return false;
    const auto before = net_.shape(net_.input(node, 0)), after = net_.shape(id);
    const size_t common = std::min(before.size(), after.size());
    const auto ones = [](std::span<const Size> dims) {
      return std::all_of(dims.begin(), dims.end(), [](const Size& dim) { return dim.is(1); });
    };
    return common > 0 &&
           std::equal(before.end() - static_cast<std::ptrdiff_t>(common), before.end(),
                      after.end() - static_cast<std::ptrdiff_t>(common)) &&
           ones(before.first(before.size() - common)) && ones(after.first(after.size() - common));
  }

  // The effects of a boolean's two values.
  std::optional<Hiding> chosen(int condition, double yes, double no) const {
    if (yes != 0 && no != 0) return std::nullopt;
    return Hiding{shown(condition, yes != 0), yes != 0 ? yes : no};
  }

  std::optional<Shown> understood(int id, bool negated) const {
    const int node = net_.producer(id);
    const auto effect = [&](auto is_true) {
      return [is_true, negated](double element) { return is_true(element) != negated ? 0.0 : 1.0; };
    };
    const auto shown_of = [](const std::optional<Hiding>& hiding) {
      return hiding ? std::optional(hiding->shown) : std::nullopt;
    };
    const auto truth = [](double element) { return element != 0; };
    if (const Constant* constant = facts(id).constant) return shown_of(of_constant(id, *constant, effect(truth)));
    if (node == kNone || !net_.node(node).domain.empty()) return std::nullopt;
    const int x = net_.input(node, 0);
    if (is(node, "Not")) return shown(x, !negated);
    if (is(node, negated ? "Or" : "And")) {
      Shown both = shown(x, negated);
      return unite(both, shown(net_.input(node, 1), negated)) ? std::optional(both) : std::nullopt;
    }
    if (is(node, "Trilu")) return shown_of(of_triangle(node, id, effect(truth)));
    if (is(node, "Slice")) return shown_of(of_slice(node, id, effect(truth)));
    const bool of_numbers = facts(x).type != ElementType::kBool;
    if (const auto number = net_.number(net_.input(node, 1)); of_numbers && number && is(node, "Equal")) {
      return shown_of(read(x, effect([=](double element) { return element == *number; })));
    }
    if (of_numbers && is(node, "Cast")) return shown_of(read(x, effect(truth)));
    return passes(node, id) ? std::optional(shown(x, negated)) : compared(node, id, negated);
  }

  // What a Trilu keeps of its input; elsewhere it is 0.
  std::optional<Hiding> of_triangle(int node, int id, const Effect& effect) const {
    const int shift = net_.input(node, 1), input = net_.input(node, 0);
    const auto k = shift == kNone ? std::optional(Affine{}) : affine_of(net_, shift);
    if (!spans(id) || !k) return std::nullopt;
    Shown kept;
    (integer_of(net_.node(node), "upper", 1) != 0 ? kept.lower : kept.upper) = k->offset;
    const double outside = effect(0);
    if (const auto number = net_.number(input)) {
      const double inside = effect(*number);
      if ((inside == 0) == (outside == 0)) return std::nullopt;
      return inside == 0 ? Hiding{kept, outside} : Hiding{complement(kept), inside};
    }
    auto found = outside != 0 ? read(input, effect) : std::nullopt;
    if (!found || found->fill != outside || !unite(found->shown, kept)) return std::nullopt;
    return found;
  }

  // What a triangle leaves out.
  Shown complement(const Shown& triangle) const {
    Shown left_out;
    if (triangle.upper) left_out.lower = net_.symbols().sum(*triangle.upper, {1, {}});
    if (triangle.lower) left_out.upper = net_.symbols().sum(*triangle.lower, {-1, {}});
    return left_out;
  }

  // Two places that are compared: x - y is sign * (j - i) + offset.
  std::optional<Shown> compared(int node, int id, bool negated) const {
    const std::string& op = net_.node(node).op_type;
    const bool less = op == "Less" || op == "LessOrEqual", more = op == "Greater" || op == "GreaterOrEqual";
    if ((!less && !more) || !spans(id)) return std::nullopt;
    const bool swapped = more != negated;  // x > y is y < x, and what denies x <= y is y < x
    const bool or_equal = (op.size() > 7) != negated;
    const auto x = affine_of(net_, net_.input(node, swapped ? 1 : 0)),
               y = affine_of(net_, net_.input(node, swapped ? 0 : 1));
    if (!x || !y) return std::nullopt;
    const size_t rank = net_.shape(id).size();
    if (x->steps.size() > rank || y->steps.size() > rank) return std::nullopt;
    std::vector<int64_t> steps(rank);
    const auto add = [&](const Affine& from, int64_t sign) {
      for (size_t i = 0; i < from.steps.size(); ++i)
        steps[steps.size() - from.steps.size() + i] += sign * from.steps[i];
    };
    add(*x, 1);
    add(*y, -1);
    const int64_t along_keys = steps.back(), along_queries = steps[steps.size() - 2];
    const bool others = std::any_of(steps.begin(), steps.end() - 2, [](int64_t step) { return step != 0; });
    if (others || std::abs(along_keys) != 1 || along_queries != -along_keys) return std::nullopt;
    Symbols& symbols = net_.symbols();
    // x <= y: x - y <= 0; x < y: x - y <= -1
    const Size apart = symbols.sum(symbols.difference(y->offset, x->offset), {or_equal ? 0 : -1, {}});
    Shown shown;
    (along_keys > 0 ? shown.upper : shown.lower) = along_keys > 0 ? apart : symbols.product(apart, {-1, {}});
    return shown;
  }

  // Rows and columns of a larger mask.
  std::optional<Hiding> of_slice(int node, int id, const Effect& effect) const {
    const int input = net_.input(node, 0);
    const auto shape = net_.shape(input);
    const auto starts = slice_starts(net_, node);
    if (!spans(id) || shape.size() < 2 || !starts) return std::nullopt;
    const size_t columns = shape.size() - 1, rows = columns - 1;
    auto found = Reader(net_, shape[rows], shape[columns], steps_).read(input, effect);
    if (!found || !found->shown.rest.empty()) return std::nullopt;
    Symbols& symbols = net_.symbols();
    const Size shift = symbols.difference((*starts)[rows], (*starts)[columns]);
    for (auto* bound : {&found->shown.lower, &found->shown.upper}) {
      if (*bound) *bound = symbols.sum(**bound, shift);
    }
    return found;
  }

  // A sum with a number, or a product.
  std::optional<Hiding> of_number(int node, const Effect& effect) const {
    for (const size_t side : {size_t{0}, size_t{1}}) {
      const auto number = net_.number(net_.input(node, side));
      if (!number) continue;
      const bool negates = is(node, "Sub") && side == 0;
      const double sign = negates ? -1 : 1, more = is(node, "Sub") && side == 1 ? -*number : *number;
      const bool multiplies = is(node, "Mul");
      return read(net_.input(node, 1 - side),
                  [=](double x) { return effect(multiplies ? x * *number : sign * x + more); });
    }
    return std::nullopt;
  }

  // A constant of which every matrix is the same band. However large: it is read once, and what is none is soon told.
  std::optional<Hiding> of_constant(int id, const Constant& constant, const Effect& effect) const {
    if (!spans(id) || constant.data.empty()) return std::nullopt;
    const int64_t columns = constant.dims.back();
    Hiding hiding;
    std::vector<Stretch> stretches;
    bool is_band = true;
    const auto take = [&](int64_t first, int64_t end, double number) {
      const double each = effect(number);
      if (each != 0) {
        is_band = hiding.fill == 0 || each == hiding.fill;
        hiding.fill = each;
        return is_band;
      }
      while (is_band && first < end) {
        const int64_t at = first / columns, stop = std::min(end, (at + 1) * columns);
        if (!stretches.empty() && stretches.back().row == at) {  // zeros of the other sign, or a gap
          is_band = stretches.back().end == first % columns;
        } else {
          stretches.push_back({at, first % columns, 0});
        }
        stretches.back().end = stop - at * columns;
        first = stop;
      }
      return is_band;
    };
    const bool is_read = for_each_run(constant, take);
    const auto band = is_read && is_band ? band_of(stretches, constant) : std::nullopt;
    if (!band) return std::nullopt;
    hiding.shown = *band;
    return hiding;
  }

  // The keys from `first` to `end` that a row shows, counted through all matrices.
  struct Stretch {
    int64_t row, first, end;
  };

  static std::optional<Shown> band_of(const std::vector<Stretch>& stretches, const Constant& constant) {
    const int64_t columns = constant.dims.back(), rows = constant.dims[constant.dims.size() - 2];
    const int64_t least = 1 - rows, most = columns - 1;
    int64_t lower = most + 1, upper = least - 1;
    for (const Stretch& each : stretches) {
      lower = std::min(lower, each.first - each.row % rows);
      upper = std::max(upper, each.end - 1 - each.row % rows);
    }
    size_t next = 0;
    const int64_t matrices =
        std::accumulate(constant.dims.begin(), constant.dims.end() - 2, int64_t{1}, std::multiplies<>());
    for (int64_t i = 0; i < matrices * rows; ++i) {
      const int64_t row = i % rows, first = std::max<int64_t>(0, row + lower), end = std::min(columns, row + upper + 1);
      if (first >= end) continue;
      if (next == stretches.size() || stretches[next].row != i || stretches[next].first != first ||
          stretches[next].end != end)
        return std::nullopt;
      ++next;
    }
    if (next != stretches.size()) return std::nullopt;
    Shown shown;
    if (lower > least) shown.lower = Size{lower, {}};
    if (upper < most) shown.upper = Size{upper, {}};
    return shown;
  }

  const Net& net_;
  const Size num_queries_, num_keys_;
  int& steps_;
};

}  // namespace

Shown shown_by(const Net& net, int value, bool negated, const Size& num_queries, const Size& num_keys) {
  int steps = 0;
  Shown shown = Reader(net, num_queries, num_keys, steps).shown(value, negated);
  return steps <= kMostSteps ? shown : Shown{{}, {}, {{value, negated}}};
}

std::optional<Hiding> hidden_by(const Net& net, int value, const Size& num_queries, const Size& num_keys) {
  int steps = 0;
  auto hiding = Reader(net, num_queries, num_keys, steps).read(value, [](double element) { return element; });
  return hiding && hiding->fill <= kHides && steps <= kMostSteps ? hiding : std::nullopt;  // NaN hides nothing
}

}  // namespace polyhead::graph
