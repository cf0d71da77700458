#include "graph/same.h"

namespace polyhead::graph {
namespace {

constexpr int kMostPairs = 300;

bool same_attributes(const Node& a, const Node& b) {
  if (a.attributes.size() != b.attributes.size()) return false;
  for (size_t i = 0; i < a.attributes.size(); ++i) {
    const Attribute &x = a.attributes[i], &y = b.attributes[i];
    if (x.name != y.name || x.encoded != y.encoded || x.encoded.empty()) return false;
  }
  return true;
}

bool same(const Net& net, int a, int b, int& pairs) {
  if (a == b) return true;
  if (a == kNone || b == kNone || ++pairs > kMostPairs) return false;
  const Facts &x = net.facts(a), &y = net.facts(b);
  if (x.type != y.type) return false;
  if (x.shape && x.shape == y.shape) {
    if (x.elements && x.elements == y.elements) return true;
    if (x.filled && x.filled == y.filled) return true;
    if (x.constant != nullptr && y.constant != nullptr && !x.constant->data.empty() &&
        x.constant->data == y.constant->data)
      return true;
  }
  const int left = net.producer(a), right = net.producer(b);
  if (left == kNone || right == kNone) return false;
  const Node &m = net.node(left), &n = net.node(right);
  if (m.op_type != n.op_type || m.domain != n.domain || m.inputs.size() != n.inputs.size() || !same_attributes(m, n) ||
      m.op_type.starts_with("Random") || m.op_type == "Dropout" || m.outputs.size() != 1 || n.outputs.size() != 1)
    return false;
  for (size_t i = 0; i < m.inputs.size(); ++i) {
    if (!same(net, net.input(left, i), net.input(right, i), pairs)) return false;
  }
  return true;
}

}  // namespace

bool same_value(const Net& net, int a, int b) {
  int pairs = 0;
  return same(net, a, b, pairs);
}

}  // namespace polyhead::graph
