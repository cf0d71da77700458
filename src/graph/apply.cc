#include <algorithm>
#include <queue>

#include "core/sentence.h"
#include "graph/nodes.h"
#include "graph/rewrite.h"

namespace polyhead::graph {

void Names::add(const Graph& graph) {
  for (const ValueInfo& input : graph.inputs) taken_.insert(input.name);
  for (const Constant& constant : graph.initializers) taken_.insert(constant.name);
  for (const Node& node : graph.nodes) {
    taken_.insert(node.name);
    taken_.insert(node.inputs.begin(), node.inputs.end());
    taken_.insert(node.outputs.begin(), node.outputs.end());
    for (const Attribute& attribute : node.attributes) {
      for (const Graph& body : attribute.graphs) add(body);
    }
  }
}

std::string Names::fresh(const std::string& wish) {
  std::string name = wish;
  while (!taken_.insert(name).second) name = sentence(wish, "_", ++last_[wish]);
  return name;
}

namespace {

using Counts = std::unordered_map<std::string, int>;

// How often each name is read, in bodies too.
void count_reads(const Node& node, int by, Counts& counts) {
  for (const std::string& name : node.inputs) counts[name] += by;
  for (const Attribute& attribute : node.attributes) {
    for (const Graph& body : attribute.graphs) {
      for (const Node& inner : body.nodes) count_reads(inner, by, counts);
      for (const ValueInfo& output : body.outputs) counts[output.name] += by;
    }
  }
}

Counts reads(const Graph& graph) {
  Counts counts;
  for (const Node& node : graph.nodes) count_reads(node, 1, counts);
  for (const ValueInfo& output : graph.outputs) counts[output.name] += 1;
  return counts;
}

// Removes what was read before and is no more; from the end, where readers stand behind what they read.
void remove_unread(Graph& graph, const Counts& before) {
  Counts now = reads(graph);
  const auto lost = [&](const std::string& name) {
    const auto was = before.find(name);
    return was != before.end() && was->second > 0 && now[name] == 0;
  };
  std::vector<Node> kept;
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    bool unread = true, any_lost = false;
    for (const std::string& name : node->outputs) {
      unread = unread && (name.empty() || now[name] == 0);
      any_lost = any_lost || lost(name);
    }
    if (unread && any_lost) {
      count_reads(*node, -1, now);
    } else {
      kept.push_back(std::move(*node));
    }
  }
  graph.nodes.assign(std::make_move_iterator(kept.rbegin()), std::make_move_iterator(kept.rend()));
  std::unordered_set<std::string> given;
  for (const ValueInfo& input : graph.inputs) given.insert(input.name);
  std::erase_if(graph.initializers,
                [&](const Constant& constant) { return lost(constant.name) && !given.contains(constant.name); });
  std::unordered_set<std::string> computed;
  for (const Node& node : graph.nodes) computed.insert(node.outputs.begin(), node.outputs.end());
  for (const Constant& constant : graph.initializers) computed.insert(constant.name);
  std::erase_if(graph.values, [&](const ValueInfo& value) {
    return before.contains(value.name) && !computed.contains(value.name) && !given.contains(value.name);
  });
}

// Each node behind those that it reads; else as they stand.
void sort_nodes(Graph& graph) {
  std::unordered_map<std::string_view, size_t> producers;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (const std::string& name : graph.nodes[i].outputs) producers.emplace(name, i);
  }
  std::vector<std::vector<size_t>> readers(graph.nodes.size());
  std::vector<size_t> waits_for(graph.nodes.size());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    Counts names;
    count_reads(graph.nodes[i], 1, names);
    for (const auto& [name, count] : names) {
      const auto at = producers.find(name);
      if (name.empty() || at == producers.end() || at->second == i) continue;
      readers[at->second].push_back(i);
      ++waits_for[i];
    }
  }
  std::priority_queue<size_t, std::vector<size_t>, std::greater<>> ready;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (waits_for[i] == 0) ready.push(i);
  }
  std::vector<Node> sorted;
  while (!ready.empty()) {
    const size_t next = ready.top();
    ready.pop();
    for (size_t reader : readers[next]) {
      if (--waits_for[reader] == 0) ready.push(reader);
    }
    sorted.push_back(std::move(graph.nodes[next]));
  }
  graph.nodes = std::move(sorted);
}

}  // namespace

void remove_unread(Graph& graph, const std::vector<std::string>& names) {
  if (names.empty()) return;
  Counts before = reads(graph);
  for (const std::string& name : names) ++before[name];
  remove_unread(graph, before);
}

void apply(Graph& graph, std::vector<Rewrite>& rewrites) {
  if (rewrites.empty()) return;
  Counts before = reads(graph);
  std::vector<bool> removed(graph.nodes.size());
  std::unordered_map<size_t, Rewrite*> at;
  std::unordered_set<std::string> told;
  for (const auto* values : {&graph.values, &graph.outputs}) {
    for (const ValueInfo& value : *values) told.insert(value.name);
  }
  for (Rewrite& each : rewrites) {
    at[static_cast<size_t>(each.at)] = &each;
    for (const Node& node : each.nodes) {
      if (!lists(" Attention AttentionGrad Linear ", node.op_type)) continue;  // these stay, read or not
      for (const std::string& name : node.outputs) before.erase(name);
    }
    for (ValueInfo& value : each.values) {
      if (told.insert(value.name).second) graph.values.push_back(std::move(value));
    }
    for (int node : each.removed) removed[static_cast<size_t>(node)] = true;
  }
  std::vector<Node> nodes;
  for (size_t i = 0; i < removed.size(); ++i) {
    if (const auto found = at.find(i); found != at.end()) {
      Rewrite& each = *found->second;
      nodes.insert(nodes.end(), std::make_move_iterator(each.nodes.begin()), std::make_move_iterator(each.nodes.end()));
      graph.initializers.insert(graph.initializers.end(), each.constants.begin(), each.constants.end());
    }
    if (!removed[i]) nodes.push_back(std::move(graph.nodes[i]));
  }
  graph.nodes = std::move(nodes);
  sort_nodes(graph);
  remove_unread(graph, before);
}

}  // namespace polyhead::graph
