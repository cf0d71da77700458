#include "graph/checks.h"

#include <algorithm>
#include <unordered_set>

#include "core/sentence.h"

namespace polyhead::graph {
namespace {

// The names of a graph and, behind them, those of the graphs around it.
struct Names {
  const Names* outer = nullptr;
  std::unordered_set<std::string_view> own = {};

  bool contains(std::string_view name) const {
    for (const Names* at = this; at != nullptr; at = at->outer) {
      if (at->own.contains(name)) return true;
    }
    return false;
  }
};

std::string words(const Node& node) {
  return sentence("node \"", node.name.empty() && !node.outputs.empty() ? node.outputs[0] : node.name, "\" (",
                  node.op_type, ")");
}

bool is_output_of_any(const Graph& graph, const std::string& name) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const Node& node) {
    return std::find(node.outputs.begin(), node.outputs.end(), name) != node.outputs.end();
  });
}

Status undefined(const Graph& graph, const std::string& reader, const std::string& name) {
  const char* why = is_output_of_any(graph, name)
                        ? ", which is computed behind it: the nodes are not in order, or form a cycle"
                        : ", which no input, initializer or node gives";
  return invalid(sentence("the model's ", reader, " reads \"", name, "\"", why));
}

Status check_graph(const Graph& graph, const Names* outer) {
  Names known{outer};
  // An initializer may have the name of an input, whose default it is; and so in bodies may inputs of what is outside.
  for (const ValueInfo& input : graph.inputs) known.own.insert(input.name);
  for (const Constant& constant : graph.initializers) known.own.insert(constant.name);
  std::unordered_set<std::string_view> defined;
  for (const Node& node : graph.nodes) {
    if (node.op_type.empty()) return invalid(sentence("the model has a node \"", node.name, "\" without an op_type"));
    for (const std::string& name : node.inputs) {
      if (!name.empty() && !known.contains(name)) return undefined(graph, words(node), name);
    }
    for (const Attribute& attribute : node.attributes) {
      for (const Graph& body : attribute.graphs) {
        if (Status status = check_graph(body, &known); !status.ok()) return status;
      }
    }
    for (const std::string& name : node.outputs) {
      if (name.empty()) continue;
      if (!defined.insert(name).second) return invalid(sentence("the model computes \"", name, "\" twice"));
      known.own.insert(name);
    }
  }
  for (const ValueInfo& output : graph.outputs) {
    if (!known.contains(output.name)) return undefined(graph, "list of outputs", output.name);
  }
  return {};
}

}  // namespace

int64_t opset_of(const Model& model) {
  for (const OpsetImport& import : model.opsets) {
    if (import.domain.empty()) return import.version;
  }
  return 0;
}

Status check_model(const Model& model) {
  for (const OpsetImport& import : model.opsets) {
    if (import.domain.empty() && (import.version < 1 || import.version > kNewestOpset)) {
      return invalid(sentence("the model's opset is ", import.version, ", known are 1 to ", kNewestOpset));
    }
  }
  return check_graph(model.graph, nullptr);
}

}  // namespace polyhead::graph
