#include "graph/linear.h"

#include <algorithm>

#include "core/sentence.h"
#include "graph/activation.h"
#include "graph/new_nodes.h"
#include "graph/nodes.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

constexpr int kMostDims = 5;  // of a Tensor

bool is_of(const Net& net, int node, std::string_view domain, std::string_view op_type) {
  return node != kNone && net.node(node).op_type == op_type && net.node(node).domain == domain;
}

float number_of(const Node& node, std::string_view name, float otherwise) {
  const Attribute* found = attribute_of(node, name);
  return found == nullptr ? otherwise : found->number.value_or(otherwise);
}

class Follower {
 public:
  Follower(const Net& net, const std::function<bool(int)>& stays) : net_(net), stays_(stays) {}

  std::optional<Linear> follow(int node) {
    if (!begin(node)) return std::nullopt;
    if (!l_.reason.empty()) return l_;
    while (step()) continue;
    return l_;
  }

 private:
  // What has been done to the sum, in this order.
  enum Stage { kProduct, kBiased, kActivated, kAdded, kNormed };

  bool begin(int node) {
    const bool is_gemm = net_.is(node, "Gemm");
    if (!is_gemm && !net_.is(node, "MatMul")) return false;
    l_.x = net_.input(node, 0), l_.weight = constant_of(net_.input(node, 1)), l_.out = net_.output(node, 0);
    const Constant* weight = l_.weight == kNone ? nullptr : net_.facts(l_.weight).constant;
    if (weight == nullptr || weight->dims.size() != 2 || l_.out == kNone || l_.x == kNone) return false;
    l_.nodes = {node};
    const Node& n = net_.node(node);
    l_.transposed = integer_of(n, "transB", 0) != 0;
    columns_ = weight->dims[l_.transposed ? 0 : 1];
    const ElementType type = weight->type;
    const bool has_kernels =
        type == ElementType::kFloat32 || type == ElementType::kFloat16 || type == ElementType::kBFloat16;
    if (!has_kernels) {
      l_.reason = sentence("its matrix is ", text_of(type));
    } else if (net_.facts(l_.x).type != type) {
      l_.reason = sentence("\"", net_.value(l_.x).name, "\" is ", text_of(net_.facts(l_.x).type));
    } else if (net_.rank(l_.x) < 2 || net_.rank(l_.x) > kMostDims || net_.rank(l_.out) < 2) {
      l_.reason = sentence("\"", net_.value(l_.x).name, "\" has ", net_.rank(l_.x),
                           " dims (-1: not known), must have 2 to ", kMostDims);
    } else if (integer_of(n, "transA", 0) != 0 || number_of(n, "alpha", 1) != 1 || number_of(n, "beta", 1) != 1) {
      l_.reason = "it transposes its first operand, or multiplies by a number";
    } else if (net_.input(node, 2) != kNone && !add(net_.input(node, 2))) {
      l_.reason = sentence("what it adds, \"", net_.value(net_.input(node, 2)).name, "\", has other dims");
    }
    return true;
  }

  // Exporters give equal constants one place, and Identity brings them to the others.
  int constant_of(int id) const {
    while (net_.is(net_.producer(id), "Identity")) id = net_.input(net_.producer(id), 0);
    return id == kNone || net_.facts(id).constant == nullptr ? kNone : id;
  }

  // n numbers that are known when the model is loaded; none: kNone.
  int vector_of(int value) const {
    const int id = constant_of(value);
    if (id == kNone) return kNone;
    const std::vector<int64_t>& dims = net_.facts(id).constant->dims;
    const bool fits = !dims.empty() && dims.back() == columns_ &&
                      std::all_of(dims.begin(), dims.end() - 1, [](int64_t dim) { return dim == 1; });
    return fits ? id : kNone;
  }

  bool same_shape(int id) const {
    const auto a = net_.shape(id), b = net_.shape(l_.out);
    return !a.empty() && std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

  // Another summand, as far as one may come now.
  bool add(int other) {
    if (const int vector = vector_of(other); stage_ < kBiased && vector != kNone) {
      l_.bias = vector;
      stage_ = kBiased;
      l_.words.push_back("bias");
      return true;
    }
    if (stage_ >= kAdded || other == l_.out || !same_shape(other) || net_.facts(other).type != type()) return false;
    l_.residual = other;
    stage_ = kAdded;
    l_.words.push_back("residual");
    return true;
  }

  ElementType type() const { return net_.facts(l_.weight).constant->type; }

  bool step() {
    if (stage_ == kNormed) return false;
    const NetValue& value = net_.value(l_.out);
    for (int user : value.users) {
      if (norm(user)) return true;
    }
    if (value.is_output || stays_(l_.out)) return false;
    if (value.users.size() == 1) {
      const int user = value.users.front();
      if (regroup(user) || summand(user) || biased_gelu(user) || skip_norm(user)) return true;
    }
    return activate();
  }

  void pass(int node) {
    l_.nodes.push_back(node);
    l_.out = net_.output(node, 0);
  }

  // Rows in other dims, as those of x, or of what x is a view of.
  bool regroup(int node) {
    if (!reshapes(net_, node) || net_.input(node, 0) != l_.out) return false;
    const auto after = net_.shape(net_.output(node, 0));
    if (after.empty() || !after.back().is(columns_)) return false;
    for (int x = l_.x;; x = net_.input(net_.producer(x), 0)) {
      const auto rows = net_.shape(x);
      if (rows.size() == after.size() && net_.rank(x) <= kMostDims &&
          std::equal(rows.begin(), rows.end() - 1, after.begin())) {
        l_.x = x;
        pass(node);
        return true;
      }
      const int above = net_.producer(x);
      if (!reshapes(net_, above)) return false;
      const auto before = net_.shape(net_.input(above, 0));
      if (before.empty() || rows.empty() || before.back() != rows.back()) return false;
    }
  }

  bool summand(int node) {
    if (!net_.is(node, "Add")) return false;
    const int other = net_.input(node, net_.input(node, 0) == l_.out ? 1 : 0);
    const auto after = net_.shape(net_.output(node, 0)), before = net_.shape(l_.out);
    if (other == kNone || !std::equal(after.begin(), after.end(), before.begin(), before.end()) || !add(other))
      return false;
    pass(node);
    return true;
  }

  // com.microsoft's, of models that ONNX Runtime has optimised.
  bool biased_gelu(int node) {
    const bool is_fast = is_of(net_, node, "com.microsoft", "FastGelu");
    if (!is_fast && !is_of(net_, node, "com.microsoft", "BiasGelu")) return false;
    if (net_.input(node, 0) != l_.out || net_.input(node, 1) == kNone || stage_ >= kBiased || !add(net_.input(node, 1)))
      return false;
    activated(is_fast ? "gelu_tanh" : "gelu");
    pass(node);
    return true;
  }

  void activated(const std::string& kind) {
    l_.activation = kind;
    l_.words.push_back(kind);
    stage_ = kActivated;
  }

  bool activate() {
    if (stage_ >= kActivated) return false;
    const ActivationNodes found = activation_of(net_, l_.out);
    if (found.kind.empty()) return false;
    activated(found.kind);
    l_.nodes.insert(l_.nodes.end(), found.nodes.begin(), found.nodes.end());
    l_.out = found.out;
    return true;
  }

  bool normed(int node, size_t gamma, size_t beta) {
    const std::string& op = net_.node(node).op_type;
    const bool is_rms = op.find("Simplified") != std::string::npos || op.starts_with("RMS");
    const int factor = vector_of(net_.input(node, gamma)), given = is_rms ? kNone : net_.input(node, beta);
    const int summand = vector_of(given);
    if (factor == kNone || (given != kNone && summand == kNone)) return false;
    l_.gamma = factor, l_.beta = summand;
    l_.norm = is_rms ? "rms" : "layer";
    l_.epsilon = static_cast<double>(number_of(net_.node(node), "epsilon", op.starts_with("Skip") ? 1e-12f : 1e-5f));
    l_.words.push_back(is_rms ? "RMS norm" : "layer norm");
    stage_ = kNormed;
    return true;
  }

  bool has_one_output(int node, size_t or_at) const {
    for (size_t i = 1; i < net_.node(node).outputs.size(); ++i) {
      const int id = net_.output(node, i);
      if (i != or_at && id != kNone && (net_.value(id).is_output || !net_.value(id).users.empty())) return false;
    }
    return net_.output(node, 0) != kNone;
  }

  // Others may read what it is of.
  bool norm(int node) {
    const Node& n = net_.node(node);
    const bool known =
        n.domain.empty() && lists(" LayerNormalization SimplifiedLayerNormalization RMSNormalization ", n.op_type);
    if (!known || net_.input(node, 0) != l_.out || !has_one_output(node, 0)) return false;
    const int64_t axis = integer_of(n, "axis", -1);
    if ((axis != -1 && axis != net_.rank(l_.out) - 1) || !normed(node, 1, 2)) return false;
    const NetValue& value = net_.value(l_.out);
    if (value.is_output || value.users.size() > 1 || stays_(l_.out)) l_.sum = l_.out;
    pass(node);
    return true;
  }

  // A residual, perhaps a bias, and a norm in one: com.microsoft's.
  bool skip_norm(int node) {
    constexpr size_t kSum = 3;
    const bool is_rms = is_of(net_, node, "com.microsoft", "SkipSimplifiedLayerNormalization");
    if (!is_rms && !is_of(net_, node, "com.microsoft", "SkipLayerNormalization")) return false;
    const size_t side = net_.input(node, 0) == l_.out ? 0 : 1;
    const int bias = net_.input(node, is_rms ? 3 : 4), other = net_.input(node, 1 - side);
    const bool may_come = stage_ < kAdded && other != l_.out && same_shape(other) && has_one_output(node, kSum);
    if (net_.input(node, side) != l_.out || !may_come) return false;
    const auto fits = [&](size_t input) { return vector_of(net_.input(node, input)) != kNone; };
    if (bias != kNone && (stage_ != kProduct || vector_of(bias) == kNone)) return false;
    if (!fits(2) || (!is_rms && !fits(3))) return false;
    if (bias != kNone) (void)add(bias);
    if (!add(other) || !normed(node, 2, 3)) return false;
    const int sum = net_.output(node, kSum);
    if (sum != kNone && (net_.value(sum).is_output || !net_.value(sum).users.empty())) l_.sum = sum;
    pass(node);
    return true;
  }

  const Net& net_;
  const std::function<bool(int)>& stays_;
  Linear l_;
  Stage stage_ = kProduct;
  int64_t columns_ = 0;
};

}  // namespace

std::optional<Linear> linear_at(const Net& net, int node, const std::function<bool(int)>& stays) {
  return Follower(net, stays).follow(node);
}

Rewrite rewrite(const Emission& emission, const Linear& linear) {
  const Net& net = emission.net;
  const auto name_of = [&](int id) { return id == kNone ? std::string() : std::string(net.value(id).name); };
  std::vector<std::string> inputs = {name_of(linear.x),        name_of(linear.weight), name_of(linear.bias),
                                     name_of(linear.residual), name_of(linear.gamma),  name_of(linear.beta)};
  while (inputs.back().empty()) inputs.pop_back();
  std::vector<std::string> outputs = {name_of(linear.out)};
  if (linear.sum != kNone) outputs.push_back(name_of(linear.sum));
  std::vector<Attribute> attributes;
  if (linear.transposed) attributes.push_back(integer("transB", 1));
  if (!linear.activation.empty()) attributes.push_back(text("activation", linear.activation));
  if (!linear.norm.empty()) {
    attributes.push_back(text("norm", linear.norm));
    attributes.push_back(number("epsilon", linear.epsilon));
  }
  const std::string name = emission.names.fresh("polyhead_linear");
  Rewrite made;
  made.at = *std::max_element(linear.nodes.begin(), linear.nodes.end());
  made.nodes.push_back({name, "Linear", "polyhead", std::move(inputs), std::move(outputs), std::move(attributes)});
  made.removed = linear.nodes;
  made.became = sentence("polyhead.Linear \"", name, "\"");
  made.pattern = "a product";
  for (const std::string& word : linear.words) made.pattern += ", " + word;
  return made;
}

}  // namespace polyhead::graph
