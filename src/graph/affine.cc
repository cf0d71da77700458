#include "graph/affine.h"

#include <algorithm>
#include <cmath>

#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

constexpr int kMostSteps = 500;
constexpr int64_t kMostStep = int64_t{1} << 20;
constexpr size_t kMostNumbers = 1 << 16;

class Finder {
 public:
  explicit Finder(const Net& net) : net_(net) {}

  std::optional<Affine> find(int id) {
    const int rank = net_.rank(id);
    if (rank < 0 || ++steps_ > kMostSteps) return std::nullopt;
    if (const auto& elements = net_.facts(id).elements; elements && elements->size() == 1) {
      return Affine{elements->front(), std::vector<int64_t>(static_cast<size_t>(rank))};
    }
    if (const auto number = net_.number(id)) return uniform(*number, rank);
    if (const Constant* constant = net_.facts(id).constant) return progression(*constant);
    const int node = net_.producer(id);
    if (node == kNone || !net_.node(node).domain.empty()) return std::nullopt;
    auto found = computed(node, id);
    return found && found->steps.size() == static_cast<size_t>(rank) ? found : std::nullopt;
  }

 private:
  std::optional<Affine> computed(int node, int id) {
    const auto is = [&](const char* op_type) { return net_.is(node, op_type); };
    if (is("Range")) return range(node);
    if (is("Identity") || is("Expand")) return widened(node, id);
    if (is("Cast")) return is_exact(net_.facts(id).type) ? find(net_.input(node, 0)) : std::nullopt;
    if (is("Unsqueeze") || is("Squeeze") || is("Reshape")) return regrouped(node, id);
    if (is("Transpose")) return transposed(node);
    if (is("Slice")) return sliced(node);
    if (is("Add") || is("Sub")) return sum(node, is("Sub") ? -1 : 1);
    if (is("Mul")) return product(node);
    return std::nullopt;
  }

  // Places of elements stay exact in these.
  static bool is_exact(ElementType type) {
    return type == ElementType::kInt64 || type == ElementType::kInt32 || type == ElementType::kFloat32 ||
           type == ElementType::kFloat64;
  }

  static std::optional<Affine> uniform(double number, int rank) {
    if (std::floor(number) != number || std::fabs(number) > 1e15) return std::nullopt;
    return Affine{{static_cast<int64_t>(number), {}}, std::vector<int64_t>(static_cast<size_t>(rank))};
  }

  // A constant with one dim that is not 1, and even steps along it.
  static std::optional<Affine> progression(const Constant& constant) {
    const auto numbers = numbers_of(constant, kMostNumbers);
    std::optional<size_t> along;
    for (size_t i = 0; i < constant.dims.size(); ++i) {
      if (constant.dims[i] == 1) continue;
      if (along) return std::nullopt;
      along = i;
    }
    if (!numbers || !along || numbers->size() < 2 || !is_exact(constant.type)) return std::nullopt;
    auto found = uniform(numbers->front(), static_cast<int>(constant.dims.size()));
    const double step = (*numbers)[1] - (*numbers)[0];
    if (!found || std::floor(step) != step || std::fabs(step) > static_cast<double>(kMostStep)) return std::nullopt;
    for (size_t i = 0; i < numbers->size(); ++i) {
      if ((*numbers)[i] != numbers->front() + step * static_cast<double>(i)) return std::nullopt;
    }
    found->steps[*along] = static_cast<int64_t>(step);
    return found;
  }

  std::optional<Affine> range(int node) {
    const auto start = find(net_.input(node, 0)), step = find(net_.input(node, 2));
    if (!start || !step || !step->offset.is_constant() || std::abs(step->offset.factor) > kMostStep)
      return std::nullopt;
    return Affine{start->offset, {step->offset.factor}};
  }

  // Along dims that are widened there was no step.
  std::optional<Affine> widened(int node, int id) {
    auto found = find(net_.input(node, 0));
    const size_t rank = net_.shape(id).size();
    if (!found || found->steps.size() > rank) return std::nullopt;
    found->steps.insert(found->steps.begin(), rank - found->steps.size(), 0);
    return found;
  }

  // Dims that are not 1 stay what they are.
  std::optional<Affine> regrouped(int node, int id) {
    const auto found = find(net_.input(node, 0));
    const auto before = net_.shape(net_.input(node, 0)), after = net_.shape(id);
    if (!found || found->steps.size() != before.size()) return std::nullopt;
    Affine result = {found->offset, std::vector<int64_t>(after.size())};
    size_t from = 0;
    const auto skip_ones = [&] {
      while (from < before.size() && before[from].is(1)) ++from;
    };
    for (size_t i = 0; i < after.size(); ++i) {
      if (after[i].is(1)) continue;
      skip_ones();
      if (from == before.size() || before[from] != after[i]) return std::nullopt;
      result.steps[i] = found->steps[from++];
    }
    skip_ones();
    return from == before.size() ? std::optional(result) : std::nullopt;
  }

  std::optional<Affine> transposed(int node) {
    const auto found = find(net_.input(node, 0));
    const Attribute* perm = attribute_of(net_.node(node), "perm");
    if (!found || (perm != nullptr && perm->integers.size() != found->steps.size())) return std::nullopt;
    Affine result = *found;
    for (size_t i = 0; i < result.steps.size(); ++i) {
      const auto from =
          axis_of(perm == nullptr ? -1 - static_cast<int64_t>(i) : perm->integers[i], result.steps.size());
      if (!from) return std::nullopt;
      result.steps[i] = found->steps[*from];
    }
    return result;
  }

  std::optional<Affine> sliced(int node) {
    auto found = find(net_.input(node, 0));
    const auto starts = slice_starts(net_, node);
    if (!found || !starts || starts->size() != found->steps.size()) return std::nullopt;
    for (size_t i = 0; i < starts->size(); ++i) {
      found->offset = net_.symbols().sum(found->offset, times((*starts)[i], found->steps[i]));
    }
    return found;
  }

  std::optional<Affine> sum(int node, int64_t sign) {
    const auto a = find(net_.input(node, 0)), b = find(net_.input(node, 1));
    if (!a || !b) return std::nullopt;
    Affine result = {net_.symbols().sum(a->offset, times(b->offset, sign)),
                     std::vector<int64_t>(std::max(a->steps.size(), b->steps.size()))};
    const size_t rank = result.steps.size();
    for (size_t i = 0; i < a->steps.size(); ++i) result.steps[rank - a->steps.size() + i] += a->steps[i];
    for (size_t i = 0; i < b->steps.size(); ++i) result.steps[rank - b->steps.size() + i] += sign * b->steps[i];
    return result;
  }

  std::optional<Affine> product(int node) {
    for (size_t side : {size_t{0}, size_t{1}}) {
      const auto number = net_.number(net_.input(node, side));
      if (!number || std::floor(*number) != *number || std::fabs(*number) > static_cast<double>(kMostStep)) continue;
      auto found = find(net_.input(node, 1 - side));
      if (!found) return std::nullopt;
      const auto factor = static_cast<int64_t>(*number);
      found->offset = times(found->offset, factor);
      for (int64_t& step : found->steps) {
        if (__builtin_mul_overflow(step, factor, &step) || std::abs(step) > kMostStep) return std::nullopt;
      }
      found->steps.insert(found->steps.begin(), net_.shape(net_.output(node, 0)).size() - found->steps.size(), 0);
      return found;
    }
    return std::nullopt;
  }

  Size times(const Size& size, int64_t factor) const { return net_.symbols().product(size, {factor, {}}); }

  const Net& net_;
  int steps_ = 0;  // of all branches together
};

}  // namespace

std::optional<Affine> affine_of(const Net& net, int value) { return Finder(net).find(value); }

std::optional<Sizes> slice_starts(const Net& net, int node) {
  const auto dims = net.shape(net.input(node, 0));
  const auto list = [&](size_t at) -> const std::optional<Sizes>& {
    static const std::optional<Sizes> nothing;
    return net.input(node, at) == kNone ? nothing : net.facts(net.input(node, at)).elements;
  };
  const auto &starts = list(1), &axes = list(3), &steps = list(4);
  const bool told = (net.input(node, 3) == kNone || axes) && (net.input(node, 4) == kNone || steps);
  if (!starts || !told || (axes && axes->size() != starts->size())) return std::nullopt;
  if (steps && !std::all_of(steps->begin(), steps->end(), [](const Size& step) { return step.is(1); }))
    return std::nullopt;
  Sizes result(dims.size(), Size{0, {}});
  for (size_t i = 0; i < starts->size(); ++i) {
    const auto axis = axis_of(axes ? (*axes)[i].factor : static_cast<int64_t>(i), dims.size());
    if (!axis || (axes && !(*axes)[i].is_constant())) return std::nullopt;
    const Size& start = (*starts)[i];
    if (!start.is_constant() || start.factor < 0) return std::nullopt;  // it might be counted from the end
    result[*axis] = start;
  }
  return result;
}

}  // namespace polyhead::graph
