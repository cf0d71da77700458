#include "graph/activation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <unordered_map>

namespace polyhead::graph {
namespace {

constexpr size_t kMostNodes = 16;
constexpr std::array kSamples = {-20.0, -5.0, -3.0, -2.0, -1.0, -0.7, -0.25, 0.0, 0.1, 0.5, 1.0, 1.6, 2.5, 4.0, 30.0};
using Numbers = std::array<double, kSamples.size()>;

double gelu(double x) { return x * (1 + std::erf(x / std::sqrt(2.0))) / 2; }
double gelu_tanh(double x) { return x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))) / 2; }

struct Known {
  const char* kind;
  double (*of)(double);
};
constexpr Known kKnown[] = {
    {"relu", [](double x) { return std::max(x, 0.0); }},
    {"gelu", gelu},
    {"gelu_tanh", gelu_tanh},
    {"silu", [](double x) { return x / (1 + std::exp(-x)); }},
};

struct Unary {
  std::string_view op_type;
  double (*of)(double);
};
constexpr Unary kUnary[] = {
    {"Identity", [](double x) { return x; }},
    {"Neg", [](double x) { return -x; }},
    {"Abs", [](double x) { return std::fabs(x); }},
    {"Exp", [](double x) { return std::exp(x); }},
    {"Sqrt", [](double x) { return std::sqrt(x); }},
    {"Reciprocal", [](double x) { return 1 / x; }},
    {"Tanh", [](double x) { return std::tanh(x); }},
    {"Sigmoid", [](double x) { return 1 / (1 + std::exp(-x)); }},
    {"Erf", [](double x) { return std::erf(x); }},
    {"Relu", [](double x) { return std::max(x, 0.0); }},
    {"FastGelu", gelu_tanh},
};
struct Binary {
  std::string_view op_type;
  double (*of)(double, double);
};
constexpr Binary kBinary[] = {
    {"Add", [](double x, double y) { return x + y; }},
    {"Sub", [](double x, double y) { return x - y; }},
    {"Mul", [](double x, double y) { return x * y; }},
    {"Div", [](double x, double y) { return x / y; }},
    {"Pow", [](double x, double y) { return std::pow(x, y); }},
    {"Max", [](double x, double y) { return std::max(x, y); }},
    {"Min", [](double x, double y) { return std::min(x, y); }},
};

template <class Function>
auto function_of(const Function& list, std::string_view op_type) -> decltype(std::begin(list)->of) {
  const auto at =
      std::find_if(std::begin(list), std::end(list), [&](const auto& each) { return each.op_type == op_type; });
  return at == std::end(list) ? nullptr : at->of;
}

class Follower {
 public:
  Follower(const Net& net, int value) : net_(net) {
    known_[value] = kSamples;
    made_ = {value};
  }

  ActivationNodes follow() {
    while (nodes_.size() < kMostNodes) {
      const int node = next();
      if (node == kNone || !compute(node)) break;
      nodes_.push_back(node);
      const int out = net_.output(node, 0);
      made_.push_back(out);
      if (!all_lead_to(out)) continue;
      if (const char* kind = kind_of(out)) return {kind, nodes_, out};
    }
    return {};
  }

 private:
  // The first reader of what is made that has not been computed: nodes stand behind what they read.
  int next() const {
    int first = kNone;
    for (int id : made_) {
      for (int user : net_.value(id).users) {
        const bool done = std::find(nodes_.begin(), nodes_.end(), user) != nodes_.end();
        if (!done && (first == kNone || user < first)) first = user;
      }
    }
    return first;
  }

  bool same_shape(int id) const {
    const auto shape = net_.shape(id), of_value = net_.shape(made_.front());
    return !shape.empty() && std::equal(shape.begin(), shape.end(), of_value.begin(), of_value.end());
  }

  const Numbers* operand(int node, size_t side) {
    const int id = net_.input(node, side);
    if (const auto found = known_.find(id); found != known_.end()) return &found->second;
    const auto number = net_.number(id);
    if (!number) return nullptr;
    known_[id].fill(*number);
    return &known_[id];
  }

  bool compute(int node) {
    const Node& n = net_.node(node);
    if (n.outputs.size() != 1 || !same_shape(net_.output(node, 0)) ||
        !(n.domain.empty() || n.domain == "com.microsoft"))
      return false;
    const Numbers* a = operand(node, 0);
    if (a == nullptr) return false;
    Numbers result;
    if (n.inputs.size() == 1) {
      auto of = function_of(kUnary, n.op_type);
      if (n.op_type == "Gelu") {
        const Attribute* how = attribute_of(n, "approximate");
        of = how != nullptr && how->text == "tanh" ? gelu_tanh : gelu;
      }
      if (of == nullptr) return false;
      std::transform(a->begin(), a->end(), result.begin(), of);
    } else {
      const auto of = function_of(kBinary, n.op_type);
      const Numbers first = *a;
      const Numbers* b = n.inputs.size() == 2 ? operand(node, 1) : nullptr;
      if (of == nullptr || b == nullptr) return false;
      std::transform(first.begin(), first.end(), b->begin(), result.begin(), of);
    }
    known_[net_.output(node, 0)] = result;
    return true;
  }

  // Whether nobody else sees what is made on the way to a value.
  bool all_lead_to(int out) const {
    return std::all_of(made_.begin(), made_.end(), [&](int id) {
      const NetValue& value = net_.value(id);
      return id == out || (!value.is_output && std::all_of(value.users.begin(), value.users.end(), [&](int user) {
               return std::find(nodes_.begin(), nodes_.end(), user) != nodes_.end();
             }));
    });
  }

  // The nearest of them, if it is near: constants of 16 bits are rounded, and two of the functions are 5e-4 apart.
  const char* kind_of(int out) const {
    const double near = net_.facts(out).type == ElementType::kFloat32 ? 2e-6 : 3e-3;
    const Numbers& numbers = known_.at(out);
    const char* nearest = nullptr;
    double least = near;
    for (const Known& each : kKnown) {
      double most = 0;
      for (size_t i = 0; i < kSamples.size(); ++i) {
        const double exact = each.of(kSamples[i]), difference = std::fabs(numbers[i] - exact) / (1 + std::fabs(exact));
        most = std::isnan(difference) ? near : std::max(most, difference);
      }
      if (most < least) least = most, nearest = each.kind;
    }
    return nearest;
  }

  const Net& net_;
  std::vector<int> nodes_, made_;
  std::unordered_map<int, Numbers> known_;
};

}  // namespace

ActivationNodes activation_of(const Net& net, int value) { return Follower(net, value).follow(); }

}  // namespace polyhead::graph
