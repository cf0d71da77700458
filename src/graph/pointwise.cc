#include "graph/pointwise.h"

#include <algorithm>
#include <string_view>

#include "graph/nodes.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

double tanh_of_gelu(double x) { return std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)); }

}  // namespace

double gelu(double x) { return x * (1 + std::erf(x / std::sqrt(2.0))) / 2; }
double gelu_tanh(double x) { return x * (1 + tanh_of_gelu(x)) / 2; }

namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double sign(double x) { return static_cast<double>((x > 0) - (x < 0)); }
double gelu_slope(double x) {
  return (1 + std::erf(x / std::sqrt(2.0))) / 2 + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
}
double gelu_tanh_slope(double x) {
  const double t = tanh_of_gelu(x);
  return (1 + t) / 2 + x * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x) / 2;
}
double zero(double) { return 0; }
double zero_of_two(double, double) { return 0; }

// A function and its derivative.
struct Unary {
  std::string_view op_type;
  double (*of)(double);
  double (*slope)(double);
};
constexpr Unary kUnary[] = {
    {"Identity", [](double x) { return x; }, [](double) { return 1.0; }},
    {"Neg", [](double x) { return -x; }, [](double) { return -1.0; }},
    {"Abs", [](double x) { return std::fabs(x); }, sign},
    {"Exp", [](double x) { return std::exp(x); }, [](double x) { return std::exp(x); }},
    {"Log", [](double x) { return std::log(x); }, [](double x) { return 1 / x; }},
    {"Sqrt", [](double x) { return std::sqrt(x); }, [](double x) { return 0.5 / std::sqrt(x); }},
    {"Reciprocal", [](double x) { return 1 / x; }, [](double x) { return -1 / (x * x); }},
    {"Tanh", [](double x) { return std::tanh(x); }, [](double x) { return 1 - std::tanh(x) * std::tanh(x); }},
    {"Sigmoid", sigmoid, [](double x) { return sigmoid(x) * sigmoid(-x); }},
    {"Erf", [](double x) { return std::erf(x); }, [](double x) { return 2 / std::sqrt(M_PI) * std::exp(-x * x); }},
    {"Relu", [](double x) { return std::max(x, 0.0); }, [](double x) { return x > 0 ? 1.0 : 0.0; }},
    {"Sin", [](double x) { return std::sin(x); }, [](double x) { return std::cos(x); }},
    {"Cos", [](double x) { return std::cos(x); }, [](double x) { return -std::sin(x); }},
    {"Softplus", [](double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }, sigmoid},
    {"Sign", sign, zero},
    {"Not", [](double x) { return x == 0 ? 1.0 : 0.0; }, zero},
    {"FastGelu", gelu_tanh, gelu_tanh_slope},
};

// A function and its derivatives by either operand.
struct Binary {
  std::string_view op_type;
  double (*of)(double, double);
  double (*by_left)(double, double);
  double (*by_right)(double, double);
};
constexpr auto kOne = [](double, double) { return 1.0; };
constexpr auto kLess = [](double x, double y) { return x < y ? 1.0 : 0.0; };
constexpr auto kMore = [](double x, double y) { return x < y ? 0.0 : 1.0; };
constexpr Binary kBinary[] = {
    {"Add", [](double x, double y) { return x + y; }, kOne, kOne},
    {"Sub", [](double x, double y) { return x - y; }, kOne, [](double, double) { return -1.0; }},
    {"Mul", [](double x, double y) { return x * y; }, [](double, double y) { return y; },
     [](double x, double) { return x; }},
    {"Div", [](double x, double y) { return x / y; }, [](double, double y) { return 1 / y; },
     [](double x, double y) { return -x / (y * y); }},
    {"Pow", [](double x, double y) { return std::pow(x, y); },
     [](double x, double y) { return y == 0 ? 0 : y * std::pow(x, y - 1); },
     [](double x, double y) { return x > 0 ? std::pow(x, y) * std::log(x) : 0; }},
    {"Max", [](double x, double y) { return std::max(x, y); }, kMore, kLess},
    {"Min", [](double x, double y) { return std::min(x, y); }, kLess, kMore},
    {"Less", kLess, zero_of_two, zero_of_two},
    {"LessOrEqual", [](double x, double y) { return x <= y ? 1.0 : 0.0; }, zero_of_two, zero_of_two},
    {"Greater", [](double x, double y) { return x > y ? 1.0 : 0.0; }, zero_of_two, zero_of_two},
    {"GreaterOrEqual", [](double x, double y) { return x >= y ? 1.0 : 0.0; }, zero_of_two, zero_of_two},
    {"Equal", [](double x, double y) { return x == y ? 1.0 : 0.0; }, zero_of_two, zero_of_two},
    {"And", [](double x, double y) { return x != 0 && y != 0 ? 1.0 : 0.0; }, zero_of_two, zero_of_two},
    {"Or", [](double x, double y) { return x != 0 || y != 0 ? 1.0 : 0.0; }, zero_of_two, zero_of_two},
};

template <class Function>
const Function* named(std::span<const Function> list, std::string_view op_type) {
  const auto at = std::find_if(list.begin(), list.end(), [&](const auto& each) { return each.op_type == op_type; });
  return at == list.end() ? nullptr : &*at;
}

Dual of_one(const Unary& function, const Dual& x) {
  Dual result = {function.of(x.value)};
  const double slope = function.slope(x.value);
  for (size_t i = 0; i < Dual::kMost; ++i) result.slopes[i] = x.slopes[i] == 0 ? 0 : slope * x.slopes[i];
  return result;
}

Dual of_two(const Binary& function, const Dual& x, const Dual& y) {
  Dual result = {function.of(x.value, y.value)};
  const double by_left = function.by_left(x.value, y.value), by_right = function.by_right(x.value, y.value);
  for (size_t i = 0; i < Dual::kMost; ++i) {  // what is not asked for may be infinite
    if (x.slopes[i] != 0) result.slopes[i] += by_left * x.slopes[i];
    if (y.slopes[i] != 0) result.slopes[i] += by_right * y.slopes[i];
  }
  return result;
}

bool is_number(const Net& net, int value) {
  const ElementType type = net.facts(value).type;
  return is_float(type) || type == ElementType::kBool;
}

}  // namespace

std::optional<Dual> pointwise(const Net& net, int node, const std::vector<std::optional<Dual>>& operands) {
  const Node& n = net.node(node);
  if (operands.empty() || !operands[0] || !(n.domain.empty() || n.domain == "com.microsoft")) return std::nullopt;
  const Dual& x = *operands[0];
  const bool has_two = operands.size() > 1 && operands[1];
  if (net.is(node, "Where")) {
    if (operands.size() != 3 || !operands[1] || !operands[2]) return std::nullopt;
    return x.value != 0 ? operands[1] : operands[2];
  }
  if (net.is(node, "Clip")) {
    Dual result = x;
    if (has_two) result = of_two(*named<Binary>(kBinary, "Max"), result, *operands[1]);
    if (operands.size() > 2 && operands[2]) result = of_two(*named<Binary>(kBinary, "Min"), result, *operands[2]);
    return result;
  }
  if (is_idle_dropout(net, node)) return x;
  if (net.is(node, "Cast")) {
    if (!is_number(net, net.input(node, 0)) || !is_number(net, net.output(node, 0))) return std::nullopt;
    return net.facts(net.output(node, 0)).type == ElementType::kBool ? Dual{x.value != 0 ? 1.0 : 0.0} : x;
  }
  if (n.outputs.size() != 1 || operands.size() > 2) return std::nullopt;
  if (operands.size() == 1 && n.op_type == "Gelu") {
    const Attribute* how = attribute_of(n, "approximate");
    const bool by_tanh = how != nullptr && how->text == "tanh";
    return of_one(by_tanh ? Unary{"", gelu_tanh, gelu_tanh_slope} : Unary{"", gelu, gelu_slope}, x);
  }
  if (operands.size() == 1) {
    const Unary* function = named<Unary>(kUnary, n.op_type);
    return function == nullptr ? std::nullopt : std::optional(of_one(*function, x));
  }
  const Binary* function = has_two ? named<Binary>(kBinary, n.op_type) : nullptr;
  return function == nullptr ? std::nullopt : std::optional(of_two(*function, x, *operands[1]));
}

}  // namespace polyhead::graph
