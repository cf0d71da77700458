#include "graph/product.h"

#include <algorithm>
#include <cctype>

#include "core/sentence.h"
#include "graph/nodes.h"

namespace polyhead::graph {
namespace {

struct Labels {
  std::string left, right, out;
  double factor = 1;
};

std::optional<Labels> matmul_labels(const Net& net, int node, std::string& reason) {
  const int a = net.rank(net.input(node, 0)), b = net.rank(net.input(node, 1));
  const Node& n = net.node(node);
  if (a < 2 || a > 8 || a != b || integer_of(n, "transBatchA", 0) != 0 || integer_of(n, "transBatchB", 0) != 0) {
    reason = sentence("the operands of ", words_of(net, node), " have ", a, " and ", b,
                      " dims, must have the same number of at least 2 (-1: not known)");
    return std::nullopt;
  }
  const std::string lead = std::string("ABCDEF").substr(0, static_cast<size_t>(a - 2));
  Labels labels = {lead + "rk", lead + "kc", lead + "rc"};
  if (integer_of(n, "transA", 0) != 0) labels.left = lead + "kr";
  if (integer_of(n, "transB", 0) != 0) labels.right = lead + "ck";
  if (const Attribute* alpha = attribute_of(n, "alpha"))
    labels.factor = static_cast<double>(alpha->number.value_or(1.0f));
  return labels;
}

std::optional<Labels> einsum_labels(const Net& net, int node, std::string& reason) {
  const Attribute* equation = attribute_of(net.node(node), "equation");
  std::string text = equation == nullptr ? "" : equation->text.value_or("");
  std::erase_if(text, [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; });
  const size_t comma = text.find(','), arrow = text.find("->");
  const bool plain = std::all_of(text.begin(), text.end(), [](char c) {
    return std::isalpha(static_cast<unsigned char>(c)) || c == ',' || c == '-' || c == '>';
  });
  if (!plain || comma == std::string::npos || arrow == std::string::npos ||
      text.find(',', comma + 1) != std::string::npos || arrow < comma) {
    reason = sentence("the equation of ", words_of(net, node), " is none of two operands with plain labels");
    return std::nullopt;
  }
  Labels labels = {text.substr(0, comma), text.substr(comma + 1, arrow - comma - 1), text.substr(arrow + 2)};
  for (std::string each : {labels.left, labels.right, labels.out}) {
    std::sort(each.begin(), each.end());
    if (std::adjacent_find(each.begin(), each.end()) != each.end()) {
      reason = sentence("the equation of ", words_of(net, node), " takes a diagonal");
      return std::nullopt;
    }
  }
  return labels;
}

std::optional<Labels> labels_of(const Net& net, int node, std::string& reason) {
  if (net.node(node).op_type == "Einsum") return einsum_labels(net, node, reason);
  return matmul_labels(net, node, reason);
}

bool has(const std::string& labels, char label) { return labels.find(label) != std::string::npos; }

// Where each of `wanted` stands in `labels`; nothing if they are not the same ones.
std::optional<std::vector<size_t>> order_of(const std::string& wanted, const std::string& labels) {
  std::vector<size_t> order;
  for (char label : wanted) {
    const size_t at = labels.find(label);
    if (at == std::string::npos) return std::nullopt;
    order.push_back(at);
  }
  return wanted.size() == labels.size() ? std::optional(order) : std::nullopt;
}

// The product that sums left [...] and right [...] to out [...], if these labels are all of the operands' and the result's.
std::optional<Product> composed(const Net& net, int node, const Labels& labels, bool swapped, const std::string& left,
                                const std::string& right, const std::string& out) {
  const auto order_left = order_of(left, swapped ? labels.right : labels.left);
  const auto order_right = order_of(right, swapped ? labels.left : labels.right);
  const auto order_out = order_of(labels.out, out);
  const bool ranks_known = net.rank(net.input(node, 0)) == static_cast<int>(labels.left.size()) &&
                           net.rank(net.input(node, 1)) == static_cast<int>(labels.right.size());
  if (!order_left || !order_right || !order_out || !ranks_known) return std::nullopt;
  return Product{node,
                 {net.input(node, swapped ? 1 : 0), *order_left},
                 {net.input(node, swapped ? 0 : 1), *order_right},
                 *order_out,
                 labels.factor};
}

}  // namespace

bool is_product(const Net& net, int node) {
  if (node == kNone || net.node(node).inputs.size() != 2) return false;
  const Node& n = net.node(node);
  return net.is(node, "MatMul") || net.is(node, "Einsum") ||
         (n.op_type == "FusedMatMul" && n.domain == "com.microsoft");
}

bool rounds(const Net& net, int node) {
  constexpr std::string_view kOpTypes =
      " QuantizeLinear DequantizeLinear DynamicQuantizeLinear MatMulInteger MatMulIntegerToFloat "
      "DynamicQuantizeMatMul ";
  if (node == kNone) return false;
  const std::string& op = net.node(node).op_type;
  return op.starts_with("QLinear") || lists(kOpTypes, op);
}

bool is_rounded_product(const Net& net, int node) {
  return rounds(net, node) && net.node(node).op_type.find("MatMul") != std::string::npos;
}

bool multiplies_stacks(const Net& net, int node) {
  if (!is_product(net, node) && !is_rounded_product(net, node)) return false;
  const int a = net.rank(net.input(node, 0)), b = net.rank(net.input(node, second_operand(net, node)));
  return a == b || a < 0 || b < 0 || net.is(node, "Einsum");
}

size_t second_operand(const Net& net, int node) { return net.node(node).op_type.starts_with("QLinear") ? 3 : 1; }

std::optional<Product> scores_product(const Net& net, int node, std::string& reason) {
  const auto labels = labels_of(net, node, reason);
  if (!labels) return std::nullopt;
  const std::string& out = labels->out;
  const size_t inner = labels->left.find_first_not_of(out);
  std::optional<Product> product;
  if (out.size() >= 2 && inner != std::string::npos) {
    const std::string lead = out.substr(0, out.size() - 2);
    const char rows = out[out.size() - 2], columns = out.back(), summed = labels->left[inner];
    product =
        composed(net, node, *labels, !has(labels->left, rows), lead + rows + summed, lead + columns + summed, out);
  }
  if (!product) reason = sentence(words_of(net, node), " is no product of two stacks of matrices");
  return product;
}

std::optional<Product> weights_product(const Net& net, int node, int weights, std::string& reason, bool sums_rows) {
  const auto labels = labels_of(net, node, reason);
  if (!labels) return std::nullopt;
  const bool swapped = net.input(node, 0) != weights;
  std::string mine = swapped ? labels->right : labels->left;
  const std::string& other = swapped ? labels->left : labels->right;
  if (sums_rows && mine.size() >= 2) std::swap(mine[mine.size() - 2], mine.back());
  if (mine.size() < 2 || has(labels->out, mine.back()) || !has(other, mine.back())) {
    reason = sentence("the product ", words_of(net, node), " does not sum over the keys, the last dim of the weights");
    return std::nullopt;
  }
  const std::string lead = mine.substr(0, mine.size() - 2);
  const size_t columns = other.find_first_not_of(mine);
  std::optional<Product> product;
  if (columns != std::string::npos) {
    const char column = other[columns], rows = mine[mine.size() - 2];
    product = composed(net, node, *labels, swapped, mine, lead + mine.back() + column, lead + rows + column);
  }
  if (!product) reason = sentence(words_of(net, node), " is no product of the weights with a stack of matrices");
  return product;
}

}  // namespace polyhead::graph
