#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string_view>
#include <utility>

#include "graph/infer.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

constexpr size_t kMostElements = 256;     // of the integers of which shapes are made
constexpr size_t kMostNumbers = 1 << 16;  // of constants that are looked through for one number

bool is_integer(ElementType type) { return type == ElementType::kInt64 || type == ElementType::kInt32; }

bool is_bool_or_integer(ElementType type) { return is_integer(type) || type == ElementType::kBool; }

const std::optional<Sizes>& elements_of(const Net& net, int node, size_t at) {
  static const std::optional<Sizes> nothing;
  const int id = net.input(node, at);
  return id == kNone ? nothing : net.facts(id).elements;
}

// Elements of two lists, of which one may have a single element.
std::optional<Sizes> pairwise(const std::optional<Sizes>& a, const std::optional<Sizes>& b, auto combine) {
  if (!a || !b || (a->size() != b->size() && a->size() != 1 && b->size() != 1)) return std::nullopt;
  if (a->empty() || b->empty()) return std::nullopt;
  Sizes result;
  for (size_t i = 0; i < std::max(a->size(), b->size()); ++i) {
    const std::optional<Size> each = combine((*a)[a->size() == 1 ? 0 : i], (*b)[b->size() == 1 ? 0 : i]);
    if (!each) return std::nullopt;
    result.push_back(*each);
  }
  return result;
}

std::optional<Size> equal(const Size& a, const Size& b) {
  if (a == b) return Size{1, {}};
  if (a.is_constant() && b.is_constant()) return Size{0, {}};
  const Size& known = a.is_constant() ? a : b;
  if (known.is_constant() && known.factor < 0) return Size{0, {}};  // the other is the size of something
  return std::nullopt;
}

std::optional<Sizes> slice(const Net& net, int node, const Sizes& list) {
  const auto number = [&](size_t at, int64_t otherwise) -> std::optional<int64_t> {
    if (net.input(node, at) == kNone) return otherwise;
    const auto& given = elements_of(net, node, at);
    if (!given || given->size() != 1 || !given->front().is_constant()) return std::nullopt;
    return given->front().factor;
  };
  const auto start = number(1, 0), end = number(2, 0), step = number(4, 1);
  if (!start || !end || step != 1) return std::nullopt;
  const auto count = static_cast<int64_t>(list.size());
  const int64_t from = std::clamp<int64_t>(*start < 0 ? *start + count : *start, 0, count);
  const int64_t to = std::clamp<int64_t>(*end < 0 ? *end + count : *end, 0, count);
  return from < to ? Sizes(list.begin() + from, list.begin() + to) : Sizes();
}

std::optional<Sizes> gather(const Sizes& list, const std::optional<Sizes>& indices) {
  if (!indices) return std::nullopt;
  Sizes result;
  for (const Size& index : *indices) {
    const auto at = index.is_constant() ? axis_of(index.factor, list.size()) : std::nullopt;
    if (!at) return std::nullopt;
    result.push_back(list[*at]);
  }
  return result;
}

std::optional<Sizes> concat(const Net& net, int node) {
  Sizes result;
  for (size_t i = 0; i < net.node(node).inputs.size(); ++i) {
    const auto& part = elements_of(net, node, i);
    if (!part || net.rank(net.input(node, i)) != 1) return std::nullopt;
    result.insert(result.end(), part->begin(), part->end());
  }
  return result;
}

std::optional<Sizes> where(const Net& net, int node) {
  const auto& condition = elements_of(net, node, 0);
  const auto &a = elements_of(net, node, 1), &b = elements_of(net, node, 2);
  if (!condition) return a && b && *a == *b ? a : std::nullopt;
  const auto chosen = pairwise(condition, a, [](const Size& c, const Size& x) -> std::optional<Size> {
    return c.is(0) ? Size{-1, {-1}} : x;  // a mark: the other
  });
  return pairwise(chosen, b, [](const Size& x, const Size& y) -> std::optional<Size> {
    return x.symbols == std::vector<int>{-1} ? y : x;
  });
}

std::optional<Sizes> elements(const Net& net, int node) {
  Symbols& symbols = net.symbols();
  const std::string& op = net.node(node).op_type;
  const auto &a = elements_of(net, node, 0), &b = elements_of(net, node, 1);
  const auto with = [&](auto combine) {
    return pairwise(a, b, [&](const Size& x, const Size& y) -> std::optional<Size> { return combine(x, y); });
  };
  if (op == "Concat") return concat(net, node);
  if (op == "Where") return where(net, node);
  if (!a) return std::nullopt;
  if (op == "Identity" || op == "Cast" || op == "Squeeze" || op == "Unsqueeze" || op == "Reshape") return a;
  if (op == "Gather") return gather(*a, b);
  if (op == "Slice") return slice(net, node, *a);
  if (op == "ReduceProd") return Sizes{symbols.product(*a)};
  if (op == "Mul") return with([&](const Size& x, const Size& y) { return symbols.product(x, y); });
  if (op == "Add") return with([&](const Size& x, const Size& y) { return symbols.sum(x, y); });
  if (op == "Sub") return with([&](const Size& x, const Size& y) { return symbols.difference(x, y); });
  if (op == "Equal") return pairwise(a, b, equal);
  if (op == "Mod") {
    return pairwise(a, b, [](const Size& x, const Size& y) -> std::optional<Size> {
      const bool known = x.is_constant() && y.is_constant() && x.factor >= 0 && y.factor > 0;
      return known ? std::optional(Size{x.factor % y.factor, {}}) : std::nullopt;
    });
  }
  if (op == "Div") {
    return pairwise(a, b, [&](const Size& x, const Size& y) -> std::optional<Size> {
      if (y.is(0)) return std::nullopt;
      return symbols.floor_quotient(x, y);
    });
  }
  return std::nullopt;
}

std::optional<double> filled(const Net& net, int node, ElementType type) {
  const std::string& op = net.node(node).op_type;
  const auto a = net.number(net.input(node, 0)), b = net.number(net.input(node, 1));
  static const std::pair<std::string_view, double (*)(double)> kUnary[] = {
      {"Neg", [](double x) { return -x; }},           {"Sqrt", [](double x) { return std::sqrt(x); }},
      {"Reciprocal", [](double x) { return 1 / x; }}, {"Exp", [](double x) { return std::exp(x); }},
      {"Log", [](double x) { return std::log(x); }},  {"Not", [](double x) { return x == 0 ? 1.0 : 0.0; }},
  };
  static const std::pair<std::string_view, double (*)(double, double)> kBinary[] = {
      {"Add", [](double x, double y) { return x + y; }},
      {"Sub", [](double x, double y) { return x - y; }},
      {"Mul", [](double x, double y) { return x * y; }},
      {"Pow", [](double x, double y) { return std::pow(x, y); }},
      {"And", [](double x, double y) { return x != 0 && y != 0 ? 1.0 : 0.0; }},
      {"Or", [](double x, double y) { return x != 0 || y != 0 ? 1.0 : 0.0; }},
  };
  if (op == "ConstantOfShape") {
    const Attribute* value = attribute_of(net.node(node), "value");
    if (value == nullptr || value->tensors.empty()) return 0.0;
    const auto numbers = numbers_of(value->tensors[0], 1);
    return numbers && numbers->size() == 1 ? std::optional(numbers->front()) : std::nullopt;
  }
  if (!a) return std::nullopt;
  for (const char* same : {"Identity", "Reshape", "Expand", "Tile", "Squeeze", "Unsqueeze", "Transpose", "Slice"}) {
    if (op == same) return a;
  }
  if (op == "Cast" || op == "CastLike") {
    if (is_float(type)) return a;
    if (is_integer(type)) return std::trunc(*a);
    if (type == ElementType::kBool) return *a != 0 ? 1.0 : 0.0;
    return std::nullopt;
  }
  for (const auto& [name, apply] : kUnary) {
    if (op == name) return apply(*a);
  }
  if (!b) return std::nullopt;
  if (op == "Div") return is_integer(type) ? std::nullopt : std::optional(*a / *b);
  for (const auto& [name, apply] : kBinary) {
    if (op == name) return apply(*a, *b);
  }
  return std::nullopt;
}

// All elements are one and the same known integer.
std::optional<double> uniform(const Sizes& list) {
  if (list.empty() || !list.front().is_constant()) return std::nullopt;
  for (const Size& each : list) {
    if (each != list.front()) return std::nullopt;
  }
  return static_cast<double>(list.front().factor);
}

}  // namespace

void infer_numbers(const Net& net, int node, Facts& result) {
  if (!net.node(node).domain.empty() || net.node(node).op_type == "Constant") return;
  const bool is_list = result.shape && result.shape->size() <= 1;
  if (!result.elements && is_list && is_bool_or_integer(result.type)) result.elements = elements(net, node);
  if (result.elements && result.elements->size() > kMostElements) result.elements.reset();
  // Integers that were cast to floats stay what they were: a scale is often computed of a dim.
  if (result.elements) result.filled = uniform(*result.elements);
  if (!result.filled) result.filled = filled(net, node, result.type);
  if (result.filled && !result.elements && is_list && is_bool_or_integer(result.type)) {
    const Size count = net.symbols().product(*result.shape);
    if (!count.is_constant() || count.factor < 0 || count.factor > static_cast<int64_t>(kMostElements)) return;
    result.elements = Sizes(static_cast<size_t>(count.factor), Size{static_cast<int64_t>(*result.filled), {}});
  }
}

Facts facts_of(const Constant& constant) {
  Facts facts = {constant.type, Sizes(), std::nullopt, std::nullopt, &constant};
  for (int64_t dim : constant.dims) facts.shape->push_back({dim, {}});
  const auto numbers = numbers_of(constant, kMostNumbers);
  if (!numbers) return facts;
  const double first = numbers->empty() ? 0 : numbers->front();
  if (!numbers->empty() && std::all_of(numbers->begin(), numbers->end(), [&](double each) { return each == first; }))
    facts.filled = first;
  if (is_integer(constant.type) && constant.dims.size() <= 1 && numbers->size() <= kMostElements) {
    facts.elements.emplace();
    const size_t size = constant.type == ElementType::kInt64 ? 8 : 4;
    for (size_t i = 0; i < numbers->size(); ++i) {  // not by doubles, which would round INT64_MAX
      int64_t wide = 0;
      int32_t narrow = 0;
      std::memcpy(size == 8 ? static_cast<void*>(&wide) : &narrow, constant.data.data() + i * size, size);
      facts.elements->push_back({size == 8 ? wide : narrow, {}});
    }
  }
  return facts;
}

}  // namespace polyhead::graph
