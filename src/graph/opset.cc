#include "graph/opset.h"

#include <algorithm>

#include "core/sentence.h"
#include "graph/new_nodes.h"
#include "graph/nodes.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

constexpr int64_t kOldestRaised = 11;  // before that, too many operators meant something else

// The opsets between 12 and 23 whose operators differ from the one before in more than new types, outputs or attributes
// with a default that is the old meaning. What is not in this table means the same in all of them.
struct Change {
  std::string_view op_types;  // between blanks
  int64_t since;
  // Why this node's meaning cannot be told, or "".
  std::string (*objection)(const Net& net, int node);
  void (*apply)(Model& model, Graph& graph, const Net& net, int node, Names& names);
};

std::string never(const Net&, int) { return ""; }
std::string always(const Net&, int) { return "means something else"; }

void nothing(Model&, Graph&, const Net&, int, Names&) {}

void drop(Node& node, std::string_view name) {
  std::erase_if(node.attributes, [&](const Attribute& attribute) { return attribute.name == name; });
  node.changed = true;
}

// An attribute of integers becomes the second input.
void to_input(Model& model, Graph& graph, int index, std::string_view name, Names& names) {
  Node& node = graph.nodes[static_cast<size_t>(index)];
  const Attribute* attribute = attribute_of(node, name);
  if (attribute == nullptr) return;
  const std::string tensor = names.fresh("polyhead_integers");
  graph.initializers.push_back(tensor_of_integers(model, tensor, attribute->integers));
  node.inputs.resize(1);
  node.inputs.push_back(tensor);
  drop(node, name);
}

void axes_to_input(Model& model, Graph& graph, const Net&, int node, Names& names) {
  to_input(model, graph, node, "axes", names);
}

void split_to_input(Model& model, Graph& graph, const Net&, int node, Names& names) {
  to_input(model, graph, node, "split", names);
}

// Equal parts are told by their number.
void num_outputs(Model&, Graph& graph, const Net&, int index, Names&) {
  Node& node = graph.nodes[static_cast<size_t>(index)];
  if (node.inputs.size() > 1 || attribute_of(node, "num_outputs") != nullptr) return;
  node.attributes.push_back(integer("num_outputs", static_cast<int64_t>(node.outputs.size())));
  node.changed = true;
}

// Once the dims behind the axis were taken for one.
std::string not_last(const Net& net, int node) {
  const int rank = net.rank(net.input(node, 0));
  const int64_t axis = integer_of(net.node(node), "axis", 1);
  return rank > 0 && (axis == rank - 1 || axis == -1) ? "" : "runs over an axis that is not known to be the last one";
}

void last_axis(Model&, Graph& graph, const Net&, int index, Names&) {
  Node& node = graph.nodes[static_cast<size_t>(index)];
  drop(node, "axis");
  node.attributes.push_back(integer("axis", -1));
}

// Inference alone: a ratio changes nothing.
void drop_ratio(Model&, Graph& graph, const Net&, int index, Names&) {
  drop(graph.nodes[static_cast<size_t>(index)], "ratio");
}

std::string trains(const Net& net, int node) {
  return net.node(node).outputs.size() > 1 ? "has the outputs of training" : "";
}

std::string old_resize(const Net& net, int node) {
  const Attribute* mode = attribute_of(net.node(node), "coordinate_transformation_mode");
  return mode != nullptr && mode->text == "tf_half_pixel_for_nn" ? "has a mode that is no more" : "";
}

constexpr Change kChanges[] = {
    {" Dropout ", 12, never, drop_ratio},
    {" Squeeze Unsqueeze ReduceSum ", 13, never, axes_to_input},
    {" Split ", 13, never, split_to_input},
    {" Softmax LogSoftmax Hardmax ", 13, not_last, last_axis},
    {" Resize ", 13, old_resize, nothing},
    {" BatchNormalization ", 14, trains, nothing},
    {" RoiAlign ", 16, always, nothing},
    {" ReduceMax ReduceMin ReduceMean ReduceProd ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare ", 18,
     never, axes_to_input},
    {" Split ", 18, never, num_outputs},
    {" GridSample DFT ", 20, always, nothing},
    {" GroupNormalization ", 21, always, nothing},
    {" Upsample Scatter ", 12, always, nothing},
};

template <class Visit>
void for_changes(const Net& net, int64_t to, Visit visit) {
  for (size_t i = 0; i < net.graph().nodes.size(); ++i) {
    const Node& node = net.graph().nodes[i];
    if (!node.domain.empty()) continue;
    for (const Change& change : kChanges) {
      const bool met = change.since > net.opset() && change.since <= to && lists(change.op_types, node.op_type);
      if (met && !visit(static_cast<int>(i), change)) return;
    }
  }
}

}  // namespace

std::string why_not_raised(const Net& net, int64_t to) {
  if (net.opset() < kOldestRaised) {
    return sentence("the model's opset is ", net.opset(), ", which is raised from ", kOldestRaised, " on only");
  }
  std::string why;
  for_changes(net, to, [&](int node, const Change& change) {
    const std::string objection = change.objection(net, node);
    if (!objection.empty()) {
      why = sentence("the opset cannot be raised from ", net.opset(), " to ", to, ": ", words_of(net, node), " ",
                     objection, " since ", change.since);
    }
    return why.empty();
  });
  return why;
}

void raise_nodes(Model& model, Graph& graph, const Net& net, int64_t to, Names& names) {
  for_changes(net, to, [&](int node, const Change& change) {
    change.apply(model, graph, net, node, names);
    return true;
  });
}

}  // namespace polyhead::graph
