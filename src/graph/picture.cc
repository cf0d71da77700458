// The nodes that a picture of a candidate shows.
#include <algorithm>
#include <set>

#include "graph/match.h"
#include "graph/nodes.h"
#include "graph/rewrite.h"

namespace polyhead::graph {
namespace {

constexpr size_t kMostNodes = 100;

// Whatever `nodes`, and what stands above them, are made of; nearest first, until somebody's output is in `ends`, or
// else above a product.
std::set<int> with_those_above(const Net& net, std::vector<int> nodes, const std::set<std::string_view>& ends) {
  std::set<int> found(nodes.begin(), nodes.end());
  for (size_t next = 0; next < nodes.size() && found.size() < kMostNodes; ++next) {
    const int node = nodes[next];
    if (ends.empty() && is_product(net, node)) continue;
    for (size_t i = 0; i < net.node(node).inputs.size(); ++i) {
      const int id = net.input(node, i), above = net.producer(id);
      if (above != kNone && !ends.contains(net.value(id).name) && found.insert(above).second) nodes.push_back(above);
    }
  }
  return found;
}

// From the softmax down to a product.
std::vector<int> below(const Net& net, const Match& match) {
  std::vector<int> nodes = {match.softmax};
  for (size_t next = 0; next < nodes.size() && nodes.size() < kMostNodes; ++next) {
    if (is_product(net, nodes[next]) || net.output(nodes[next], 0) == kNone) continue;
    for (int user : net.value(net.output(nodes[next], 0)).users) {
      if (std::find(nodes.begin(), nodes.end(), user) == nodes.end()) nodes.push_back(user);
    }
  }
  return nodes;
}

}  // namespace

std::vector<Node> nodes_before(const Net& net, const Match& match, const Rewrite* rewrite) {
  std::set<std::string_view> ends;
  if (rewrite != nullptr) {
    for (const Node& node : rewrite->nodes) ends.insert(node.inputs.begin(), node.inputs.end());
  }
  std::vector<Node> nodes;
  for (int node : with_those_above(net, rewrite != nullptr ? rewrite->removed : below(net, match), ends)) {
    const Node& from = net.node(node);
    nodes.push_back({from.name, from.op_type, from.domain, from.inputs, from.outputs});
  }
  return nodes;
}

}  // namespace polyhead::graph
