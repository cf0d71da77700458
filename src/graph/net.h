// A graph with its names resolved, and what can be told of its values before it runs.
#pragma once

#include <deque>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "graph/size.h"
#include "polyhead/graph.h"

namespace polyhead::graph {

constexpr int kNone = -1;

// Of a tensor.
struct Facts {
  ElementType type = ElementType::kUnknown;
  std::optional<Sizes> shape = {};
  std::optional<Sizes> elements = {};  // of integers in at most one dim
  std::optional<double> filled = {};   // every element is this number
  const Constant* constant = nullptr;  // its data, where that is known
};

struct NetValue {
  std::string_view name;
  int producer = kNone;         // the node
  std::vector<int> users = {};  // nodes, each once; a node whose bodies read the value too
  bool is_output = false;       // of the graph
  bool is_outer = false;        // of the graph around
  Facts facts = {};
};

class Net {
 public:
  // The model, its graph, or one of a body inside `outer`, stay as they are while this lives.
  Net(const Model& model, const Graph& graph, Symbols& symbols, const Net* outer = nullptr);

  const Graph& graph() const { return graph_; }
  Symbols& symbols() const { return symbols_; }
  int64_t opset() const { return opset_; }

  const Node& node(int index) const { return graph_.nodes[static_cast<size_t>(index)]; }
  // Values by the places of a node's inputs and outputs; kNone: left out.
  int input(int node, size_t at) const { return at_or_none(inputs_[static_cast<size_t>(node)], at); }
  int output(int node, size_t at) const { return at_or_none(outputs_[static_cast<size_t>(node)], at); }
  const NetValue& value(int id) const { return values_[static_cast<size_t>(id)]; }
  const Facts& facts(int id) const { return value(id).facts; }
  int num_values() const { return static_cast<int>(values_.size()); }

  // The node that computes a value, or kNone; and whether it is one of ONNX's own with this name.
  int producer(int id) const { return id == kNone ? kNone : value(id).producer; }
  bool is(int node, std::string_view op_type) const {
    return node != kNone && this->node(node).op_type == op_type && this->node(node).domain.empty();
  }
  const NetValue* find(std::string_view name) const;

  // Dims that are known, or an empty list.
  std::span<const Size> shape(int id) const;
  // The number of dims, or -1.
  int rank(int id) const;
  // The number that a value is filled with.
  std::optional<double> number(int id) const { return id == kNone ? std::nullopt : facts(id).filled; }

 private:
  static int at_or_none(const std::vector<int>& list, size_t at) { return at < list.size() ? list[at] : kNone; }
  int value_named(std::string_view name);
  void add_uses(const Graph& body, int node);
  void declare(const ValueInfo& told);

  const Graph& graph_;
  Symbols& symbols_;
  const Net* outer_;
  int64_t opset_;
  std::vector<NetValue> values_;
  std::unordered_map<std::string_view, int> ids_;
  std::vector<std::vector<int>> inputs_, outputs_;
};

const Attribute* attribute_of(const Node& node, std::string_view name);
int64_t integer_of(const Node& node, std::string_view name, int64_t otherwise);

// -3 of 4 is 1; nothing if it lies outside.
std::optional<size_t> axis_of(int64_t axis, size_t rank);

// The axes of Squeeze, Unsqueeze and Reduce..., an attribute or, in newer opsets, an input.
std::optional<std::vector<int64_t>> axes_of(const Net& net, int node);

}  // namespace polyhead::graph
