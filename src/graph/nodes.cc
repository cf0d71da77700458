#include "graph/nodes.h"

#include <algorithm>

#include "core/sentence.h"

namespace polyhead::graph {

std::string words_of(const Net& net, int node) {
  const Node& n = net.node(node);
  const std::string& name = n.name.empty() && !n.outputs.empty() ? n.outputs[0] : n.name;
  return sentence("\"", name, "\" (", n.op_type, ")");
}

bool contains(const std::vector<int>& list, int id) { return std::find(list.begin(), list.end(), id) != list.end(); }

bool same_shape(std::span<const Size> a, std::span<const Size> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

bool lists(std::string_view names, std::string_view name) {
  for (size_t at = names.find(name, 1); at < names.size() - name.size(); at = names.find(name, at + 1)) {
    if (names[at - 1] == ' ' && names[at + name.size()] == ' ') return true;
  }
  return false;
}

bool keeps_shape(const Net& net, int node, size_t side) {
  const auto before = net.shape(net.input(node, side)), after = net.shape(net.output(node, 0));
  return !before.empty() && std::equal(before.begin(), before.end(), after.begin(), after.end(),
                                       [](const Size& a, const Size& b) { return !a.is(1) || b.is(1); });
}

bool reshapes(const Net& net, int node) {
  return node != kNone && net.node(node).domain.empty() &&
         lists(" Reshape Flatten Squeeze Unsqueeze ", net.node(node).op_type);
}

bool keeps_matrix(const Net& net, int node) {
  if (!reshapes(net, node)) return false;
  const auto before = net.shape(net.input(node, 0)), after = net.shape(net.output(node, 0));
  return before.size() >= 2 && after.size() >= 2 && std::equal(before.end() - 2, before.end(), after.end() - 2);
}

std::optional<Scaled> scaled_by(const Net& net, int node) {
  const bool is_div = net.is(node, "Div");
  if (!is_div && !net.is(node, "Mul")) return std::nullopt;
  for (const size_t side : {size_t{0}, size_t{1}}) {
    const auto number = net.number(net.input(node, 1 - side));
    if (number && !(is_div && side == 1)) return Scaled{side, net.input(node, side), *number, is_div};
  }
  return std::nullopt;
}

bool reduces_last(const Net& net, int node) {
  const auto axes = axes_of(net, node);
  return axes && axes->size() == 1 && (axes->front() == -1 || axes->front() == net.rank(net.input(node, 0)) - 1);
}

bool is_idle_dropout(const Net& net, int node) {
  const int training = net.input(node, 2);
  return net.is(node, "Dropout") && (training == kNone || net.number(training) == 0.0);
}

std::optional<std::vector<size_t>> perm_of(const Net& net, int node, size_t rank) {
  std::vector<size_t> perm(rank);
  const Attribute* told = attribute_of(net.node(node), "perm");
  std::vector<bool> seen(rank);
  if (told != nullptr && told->integers.size() != rank) return std::nullopt;
  for (size_t i = 0; i < rank; ++i) {
    const int64_t from = told == nullptr ? static_cast<int64_t>(rank - 1 - i) : told->integers[i];
    if (from < 0 || from >= static_cast<int64_t>(rank) || seen[static_cast<size_t>(from)]) return std::nullopt;
    perm[i] = static_cast<size_t>(from);
    seen[perm[i]] = true;
  }
  return perm;
}

std::vector<size_t> inverse_of(const std::vector<size_t>& perm) {
  std::vector<size_t> inverse(perm.size());
  for (size_t i = 0; i < perm.size(); ++i) inverse[perm[i]] = i;
  return inverse;
}

std::vector<int> nodes_between(const Net& net, int first, int last, const std::vector<int>& ends) {
  std::vector<bool> behind(static_cast<size_t>(last - first + 1)), ahead = behind;
  const auto place = [&](int node) { return static_cast<size_t>(node - first); };
  const auto producers = [&](int node, auto visit) {
    for (size_t i = 0; i < net.node(node).inputs.size(); ++i) {
      const int producer = net.producer(net.input(node, i));
      if (producer >= first && std::find(ends.begin(), ends.end(), net.input(node, i)) == ends.end()) visit(producer);
    }
  };
  behind[0] = ahead[0] = ahead[place(last)] = true;
  for (int node = first + 1; node <= last; ++node) {
    producers(node, [&](int producer) { behind[place(node)] = behind[place(node)] || behind[place(producer)]; });
  }
  std::vector<int> nodes;
  for (int node = last; node >= first; --node) {
    if (!ahead[place(node)] || !behind[place(node)]) continue;
    nodes.insert(nodes.begin(), node);
    producers(node, [&](int producer) { ahead[place(producer)] = true; });
  }
  return nodes;
}

}  // namespace polyhead::graph
