#include "dot.h"

#include <fmt/format.h>

#include <map>

namespace polyhead::tools {
namespace {

// A string of DOT; what is no printable ASCII becomes a question mark.
std::string quoted(const std::string& text) {
  std::string shown = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') shown += '\\';
    shown += c >= 0x20 && c < 0x7f ? c : '?';
  }
  return shown + "\"";
}

// Identifiers are "before#3" for nodes, "before q" for values that come from elsewhere.
void add_part(const std::string& part, const std::string& label, const std::vector<graph::Node>& nodes,
              const std::string& reason, std::string& text) {
  std::map<std::string, std::string> makers;  // of values, as identifiers
  std::string edges;
  text += fmt::format("  subgraph \"cluster_{}\" {{\n    label={};\n", part, quoted(label));
  for (size_t i = 0; i < nodes.size(); ++i) {
    const graph::Node& node = nodes[i];
    const std::string id = fmt::format("{}#{}", part, i);
    const std::string& name = node.name.empty() && !node.outputs.empty() ? node.outputs[0] : node.name;
    const bool at_fault = reason.find(fmt::format("\"{}\" ({})", name, node.op_type)) != std::string::npos;
    const std::string op = node.domain.empty() ? node.op_type : node.domain + "." + node.op_type;
    text += fmt::format("    {} [label={}{}];\n", quoted(id), quoted(op == name ? op : op + ": " + name),
                        at_fault ? ", color=red" : "");
    for (const std::string& input : node.inputs) {
      if (input.empty()) continue;
      const auto [maker, is_new] = makers.try_emplace(input, fmt::format("{} {}", part, input));
      if (is_new) text += fmt::format("    {} [label={}, shape=ellipse];\n", quoted(maker->second), quoted(input));
      edges += fmt::format("    {} -> {};\n", quoted(maker->second), quoted(id));
    }
    for (const std::string& output : node.outputs) makers[output] = id;
  }
  text += edges + "  }\n";
}

}  // namespace

std::string dot_of(const graph::Candidate& candidate) {
  std::string text = fmt::format("digraph {} {{\n  node [shape=box];\n", quoted(candidate.place));
  const std::string& reason = candidate.reason;
  add_part("before", candidate.fused ? candidate.pattern : "stays: " + reason, candidate.before, reason, text);
  if (candidate.fused) add_part("after", candidate.became, candidate.after, "", text);
  return text + "}\n";
}

}  // namespace polyhead::tools
