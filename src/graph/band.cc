#include "graph/band.h"

#include <algorithm>
#include <cmath>

#include "graph/affine.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

constexpr int kMostDepth = 64;
constexpr size_t kMostNumbers = 1 << 22;  // of a mask that is a constant
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
  Reader(const Net& net, const Size& num_queries, const Size& num_keys)
      : net_(net), num_queries_(num_queries), num_keys_(num_keys) {}

  Shown read(int id, bool negated, int depth = 0) const {
    if (const auto told = net_.number(id); told && (*told != 0) != negated) return {};  // it hides nothing
    auto shown = depth > kMostDepth ? std::nullopt : understood(id, negated, depth + 1);
    return shown ? *shown : Shown{{}, {}, {{id, negated}}};
  }

  std::optional<Hiding> read_added(int id, double factor, int depth = 0) const {
    const int node = net_.producer(id);
    if (depth > kMostDepth) return std::nullopt;
    if (const Constant* constant = facts(id).constant) return constant_bias(id, *constant, factor);
    if (is(node, "Where")) return chosen(node, factor);
    if (is(node, "Mul")) return scaled(node, factor, depth + 1);
    if (is(node, "Trilu")) {
      const auto number = net_.number(net_.input(node, 0));
      const auto kept = number ? triangle(node, id) : std::nullopt;
      const auto shown = kept ? complement(*kept) : std::nullopt;
      return shown ? hiding(*shown, *number * factor) : std::nullopt;
    }
    if (passes(node, id) && is_float(facts(net_.input(node, 0)).type)) {
      return read_added(net_.input(node, 0), factor, depth + 1);
    }
    return std::nullopt;
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
    if (!is(node, "Unsqueeze") && !is(node, "Reshape") && !is(node, "Squeeze")) return false;
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

  std::optional<Shown> understood(int id, bool negated, int depth) const {
    const int node = net_.producer(id);
    if (facts(id).constant != nullptr) return constant_mask(id, *facts(id).constant, negated);
    if (node == kNone || !net_.node(node).domain.empty()) return std::nullopt;
    if (is(node, "Not")) return read(net_.input(node, 0), !negated, depth);
    if (is(node, negated ? "Or" : "And")) {
      Shown shown = read(net_.input(node, 0), negated, depth);
      return unite(shown, read(net_.input(node, 1), negated, depth)) ? std::optional(shown) : std::nullopt;
    }
    if (is(node, "Trilu")) return trilu(node, id, negated, depth);
    if (is(node, "Equal") && net_.number(net_.input(node, 1)) == 0.0) {
      return truth(net_.input(node, 0), !negated, depth);
    }
    if (is(node, "Slice")) return sliced(node, id, negated, depth);
    if (is(node, "Cast") && facts(id).type == ElementType::kBool) return truth(net_.input(node, 0), negated, depth);
    if (passes(node, id))
      return facts(id).type == ElementType::kBool ? std::optional(read(net_.input(node, 0), negated, depth))
                                                  : std::nullopt;
    return compared(node, id, negated);
  }

  // Whether numbers are not 0. A part of the rest has to be a boolean.
  std::optional<Shown> truth(int id, bool negated, int depth) const {
    if (facts(id).type == ElementType::kBool) return read(id, negated, depth);
    const int node = net_.producer(id);
    if (is(node, "Cast") || is(node, "Identity")) return truth(net_.input(node, 0), negated, depth + 1);
    const auto shown = is(node, "Trilu")               ? trilu(node, id, negated, depth)
                       : facts(id).constant != nullptr ? constant_mask(id, *facts(id).constant, negated)
                                                       : std::nullopt;
    return shown && shown->rest.empty() ? shown : std::nullopt;
  }

  // What a Trilu keeps of its input.
  std::optional<Shown> triangle(int node, int id) const {
    const int shift = net_.input(node, 1);
    const auto k = shift == kNone ? std::optional(Affine{}) : affine_of(net_, shift);
    if (!spans(id) || !k) return std::nullopt;
    Shown kept;
    (integer_of(net_.node(node), "upper", 1) != 0 ? kept.lower : kept.upper) = k->offset;
    return kept;
  }

  std::optional<Shown> trilu(int node, int id, bool negated, int depth) const {
    const auto kept = triangle(node, id);
    const int input = net_.input(node, 0);
    const auto number = net_.number(input);
    if (!kept) return std::nullopt;
    if (negated) return number && *number != 0 ? complement(*kept) : std::nullopt;
    if (number) return *number != 0 ? kept : std::nullopt;
    if (facts(input).type != ElementType::kBool) return std::nullopt;
    Shown shown = read(input, false, depth);
    return unite(shown, *kept) ? std::optional(shown) : std::nullopt;
  }

  // What a band leaves out, if that is one too.
  std::optional<Shown> complement(const Shown& band) const {
    if (!band.rest.empty() || band.lower.has_value() == band.upper.has_value()) return std::nullopt;
    Shown left_out;
    if (band.upper) left_out.lower = net_.symbols().sum(*band.upper, {1, {}});
    if (band.lower) left_out.upper = net_.symbols().sum(*band.lower, {-1, {}});
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
  std::optional<Shown> sliced(int node, int id, bool negated, int depth) const {
    const int input = net_.input(node, 0);
    const auto shape = net_.shape(input);
    const auto starts = slice_starts(net_, node);
    if (!spans(id) || shape.size() < 2 || !starts) return std::nullopt;
    const size_t columns = shape.size() - 1, rows = columns - 1;
    Shown shown = Reader(net_, shape[rows], shape[columns]).read(input, negated, depth);
    if (!shown.rest.empty()) return std::nullopt;
    Symbols& symbols = net_.symbols();
    const Size shift = symbols.difference((*starts)[rows], (*starts)[columns]);
    for (auto* bound : {&shown.lower, &shown.upper}) {
      if (*bound) *bound = symbols.sum(**bound, shift);
    }
    return shown;
  }

  // A constant of which every matrix is the same band.
  std::optional<Shown> constant_mask(int id, const Constant& constant, bool negated) const {
    const auto numbers = numbers_of(constant, kMostNumbers);
    if (!numbers || !spans(id)) return std::nullopt;
    std::vector<bool> visible(numbers->size());
    for (size_t i = 0; i < visible.size(); ++i) visible[i] = ((*numbers)[i] != 0) != negated;
    return band_of(visible, constant);
  }

  std::optional<Hiding> constant_bias(int id, const Constant& constant, double factor) const {
    const auto numbers = numbers_of(constant, kMostNumbers);
    if (!numbers || !spans(id)) return std::nullopt;
    const auto fill = std::find_if(numbers->begin(), numbers->end(), [](double each) { return each != 0; });
    if (fill == numbers->end()) return std::nullopt;
    std::vector<bool> visible(numbers->size());
    for (size_t i = 0; i < visible.size(); ++i) {
      visible[i] = (*numbers)[i] == 0;
      if (!visible[i] && (*numbers)[i] != *fill) return std::nullopt;
    }
    const auto shown = band_of(visible, constant);
    return shown ? hiding(*shown, *fill * factor) : std::nullopt;
  }

  static std::optional<Shown> band_of(const std::vector<bool>& visible, const Constant& constant) {
    const int64_t columns = constant.dims.back(), rows = constant.dims[constant.dims.size() - 2];
    const int64_t least = 1 - rows, most = columns - 1;
    int64_t lower = most + 1, upper = least - 1;
    const auto distance = [&](size_t at) {
      const auto place = static_cast<int64_t>(at);
      return place % columns - place / columns % rows;
    };
    for (size_t i = 0; i < visible.size(); ++i) {
      if (!visible[i]) continue;
      lower = std::min(lower, distance(i));
      upper = std::max(upper, distance(i));
    }
    for (size_t i = 0; i < visible.size(); ++i) {
      if (visible[i] != (lower <= distance(i) && distance(i) <= upper)) return std::nullopt;
    }
    Shown shown;
    if (lower > least) shown.lower = Size{lower, {}};
    if (upper < most) shown.upper = Size{upper, {}};
    return shown;
  }

  // Where(condition, 0, fill), either way round.
  std::optional<Hiding> chosen(int node, double factor) const {
    const auto yes = net_.number(net_.input(node, 1)), no = net_.number(net_.input(node, 2));
    if (!yes || !no || (*yes == 0) == (*no == 0)) return std::nullopt;
    const bool negated = *no == 0;
    return hiding(read(net_.input(node, 0), negated), (negated ? *yes : *no) * factor);
  }

  // A mask of 0 and 1, or a hiding one, times a number.
  std::optional<Hiding> scaled(int node, double factor, int depth) const {
    for (size_t side : {size_t{0}, size_t{1}}) {
      const auto number = net_.number(net_.input(node, side));
      if (!number || !std::isfinite(*number)) continue;
      const int other = net_.input(node, 1 - side), cast = net_.producer(other);
      if (is(cast, "Cast") && facts(net_.input(cast, 0)).type == ElementType::kBool) {
        return hiding(read(net_.input(cast, 0), true), *number * factor);
      }
      if (is(cast, "Sub") && net_.number(net_.input(cast, 0)) == 1.0) {  // 1 - visible
        const int ones = net_.producer(net_.input(cast, 1));
        if (!is(ones, "Cast") || facts(net_.input(ones, 0)).type != ElementType::kBool) return std::nullopt;
        return hiding(read(net_.input(ones, 0), false), *number * factor);
      }
      return read_added(other, *number * factor, depth);
    }
    return std::nullopt;
  }

  static std::optional<Hiding> hiding(const Shown& shown, double fill) {
    return fill <= kHides ? std::optional(Hiding{shown, fill}) : std::nullopt;  // NaN hides nothing
  }

  const Net& net_;
  const Size num_queries_, num_keys_;
};

}  // namespace

Shown shown_by(const Net& net, int value, bool negated, const Size& num_queries, const Size& num_keys) {
  return Reader(net, num_queries, num_keys).read(value, negated);
}

std::optional<Hiding> hidden_by(const Net& net, int value, const Size& num_queries, const Size& num_keys) {
  return Reader(net, num_queries, num_keys).read_added(value, 1);
}

}  // namespace polyhead::graph
