#include "graph_nodes.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "api.h"
#include "core/dtype.h"
#include "core/sentence.h"

namespace polyhead::onnxruntime {
namespace {

const graph::Attribute* attribute_of(const graph::Node& node, std::string_view name) {
  const auto at = std::find_if(node.attributes.begin(), node.attributes.end(),
                               [&](const graph::Attribute& each) { return each.name == name; });
  return at == node.attributes.end() ? nullptr : &*at;
}

std::vector<int> order_of(const graph::Node& transpose) {
  const graph::Attribute* perm = attribute_of(transpose, "perm");
  return perm == nullptr ? std::vector<int>() : std::vector<int>(perm->integers.begin(), perm->integers.end());
}

constexpr std::array kKnown = {"scale",
                               "softcap",
                               "q_num_heads",
                               "kv_num_heads",
                               "softmax_precision",
                               "is_causal",
                               "mask_broadcasts",
                               "left_window_size",
                               "right_window_size",
                               "qk_matmul_output_mode",
                               "score",
                               "transB",
                               "activation",
                               "norm",
                               "epsilon"};

}  // namespace

std::optional<int64_t> GraphAttributes::integer(const char* name) const {
  const graph::Attribute* found = attribute_of(node_, name);
  return found == nullptr ? std::nullopt : found->integer;
}

std::optional<float> GraphAttributes::number(const char* name) const {
  const graph::Attribute* found = attribute_of(node_, name);
  return found == nullptr ? std::nullopt : found->number;
}

std::optional<std::string> GraphAttributes::text(const char* name) const {
  const graph::Attribute* found = attribute_of(node_, name);
  return found == nullptr ? std::nullopt : found->text;
}

GraphNodes::GraphNodes(const graph::Model& model, const std::function<bool(const graph::Node&)>& is_new,
                       std::function<bool(const std::string&)> was_computed)
    : was_computed_(std::move(was_computed)) {
  for (const graph::Constant& constant : model.graph.initializers) constants_[constant.name] = &constant;
  for (const graph::Node& node : model.graph.nodes) {
    if (!is_new(node)) continue;
    for (const std::string& output : node.outputs) producers_[output] = &node;
    if (!node.inputs.empty()) readers_[node.inputs[0]] = &node;
  }
}

const graph::Node* GraphNodes::producer(const std::string& value) const {
  const auto at = producers_.find(value);
  return at == producers_.end() ? nullptr : at->second;
}

bool GraphNodes::integers(const std::string& name, std::vector<int64_t>& to) const {
  const auto at = constants_.find(name);
  if (at == constants_.end() || at->second->type != graph::ElementType::kInt64) return false;
  to.resize(at->second->data.size() / sizeof(int64_t));
  std::memcpy(to.data(), at->second->data.data(), to.size() * sizeof(int64_t));
  return true;
}

bool GraphNodes::number(const std::string& name, double& to) const {
  const auto at = constants_.find(name);
  DType dtype;
  if (at == constants_.end() || !dtype_of(at->second->type, dtype) || dtype > DType::kFloat64 ||
      at->second->data.size() != dtype_size_bytes(dtype)) {
    return false;
  }
  alignas(8) char element[8];
  std::memcpy(element, at->second->data.data(), at->second->data.size());
  to = load_element(element, dtype, 0);
  return true;
}

// Of Unsqueeze and Squeeze, an attribute or, in newer opsets, an input.
bool GraphNodes::axes(const graph::Node& node, std::vector<int64_t>& to) const {
  if (const graph::Attribute* told = attribute_of(node, "axes")) return to = told->integers, true;
  return node.inputs.size() == 2 && integers(node.inputs[1], to);
}

std::string GraphNodes::source(const std::string& value, Source& to) const {
  const graph::Node* node = was_computed_(value) ? nullptr : producer(value);  // else it is another operator's result
  if (node == nullptr) {
    to.name = value;
    return "";
  }
  const std::string& op = node->op_type;
  std::vector<int64_t> list;
  const auto viewed = [&](ViewStep step) {
    std::string reason = source(node->inputs[0], to);
    to.steps.push_back(std::move(step));
    return reason;
  };
  if (op == "Transpose") return viewed({ViewStep::kTranspose, order_of(*node)});
  if (op == "Unsqueeze" && axes(*node, list)) {
    for (size_t i = 0; i < list.size(); ++i) {
      if (list[i] != static_cast<int64_t>(i)) return "a new dim is not the first one";
    }
    return viewed({ViewStep::kOnesAhead, {}, static_cast<int64_t>(list.size())});
  }
  if (op == "Reshape") {  // to [batch, heads, ...], where ... are its last dims
    const graph::Node* shape = producer(node->inputs[1]);
    if (shape == nullptr || shape->op_type != "Concat" || !integers(shape->inputs[0], list) || list.size() != 2)
      return "a reshape of a mask is not known";
    return viewed({ViewStep::kLeadTwo, {list.begin(), list.end()}});
  }
  const std::pair<const char*, Source::Kind> kinds[] = {{"Not", Source::kNot},      {"And", Source::kAnd},
                                                        {"Add", Source::kAdd},      {"Mul", Source::kProduct},
                                                        {"Div", Source::kQuotient}, {"Where", Source::kChoose}};
  const auto kind =
      std::find_if(std::begin(kinds), std::end(kinds), [&](const auto& each) { return op == each.first; });
  if (kind == std::end(kinds)) return sentence("an operand needs ", op);
  to.kind = kind->second;
  if (to.kind == Source::kProduct && number(node->inputs[1], to.numbers[0])) to.kind = Source::kTimes;
  const bool has_numbers = to.kind == Source::kTimes || to.kind == Source::kChoose;
  for (size_t i = 1; has_numbers && i < node->inputs.size(); ++i) {
    if (!number(node->inputs[i], to.numbers[i - 1])) return sentence("a number of ", op, " is not known");
  }
  for (size_t i = 0; i < (has_numbers ? 1 : node->inputs.size()); ++i) {
    to.of.emplace_back();
    if (std::string reason = source(node->inputs[i], to.of.back()); !reason.empty()) return reason;
  }
  return "";
}

std::string GraphNodes::target(std::string value, Target& to) const {
  while (!was_computed_(value)) {
    const auto at = readers_.find(value);
    if (at == readers_.end()) return "its output is not known";
    const graph::Node& node = *at->second;
    if (node.op_type == "Transpose") {
      to.steps.push_back({ViewStep::kTranspose, order_of(node)});
    } else if (node.op_type == "Reshape") {
      to.steps.push_back({ViewStep::kMergeFirst});
    } else {
      return sentence("its output goes through ", node.op_type);
    }
    value = node.outputs[0];
  }
  to.name = value;
  return "";
}

// An element of a shape: a number, a dim of a value, by Shape of one element or by Slice of a Shape, or the sum of two.
bool GraphNodes::size(const std::string& value, ToldShape::Size& to) const {
  std::vector<int64_t> list;
  if (integers(value, list)) return to.number += list.empty() ? 0 : list[0], list.size() == 1;
  const graph::Node* node = producer(value);
  if (node == nullptr) return false;
  if (node->op_type == "Add") return size(node->inputs[0], to) && size(node->inputs[1], to);
  if (node->op_type == "Slice") {
    if (!integers(node->inputs[1], list) || list.size() != 1) return false;
    node = producer(node->inputs[0]);
  }
  if (node == nullptr || node->op_type != "Shape") return false;
  const graph::Attribute* start = attribute_of(*node, "start");
  const auto dim = static_cast<size_t>(start != nullptr ? start->integer.value_or(0) : list[0]);
  to.parts.push_back({node->inputs[0], 0, dim});
  return true;
}

std::string GraphNodes::wire(const graph::Node& node, const std::vector<std::string>& kept,
                             const std::vector<graph::Node>& beside, Wiring& wiring) const {
  for (const graph::Attribute& attribute : node.attributes) {
    if (std::find(kKnown.begin(), kKnown.end(), attribute.name) == kKnown.end()) {
      return sentence("its attribute ", attribute.name, " cannot be said in a group");
    }
  }
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const std::string& input = node.inputs[i];
    const bool comes = !input.empty() && (i >= kept.size() || kept[i].empty());
    wiring.inputs.push_back(comes ? std::make_unique<Source>() : nullptr);
    if (!comes) continue;
    if (std::string reason = source(input, *wiring.inputs.back()); !reason.empty()) return reason;
  }
  for (const std::string& output : node.outputs) {
    wiring.outputs.push_back(output.empty() ? nullptr : std::make_unique<Target>());
    if (output.empty()) continue;
    if (std::string reason = target(output, *wiring.outputs.back()); !reason.empty()) return reason;
  }
  for (const graph::Node& other : beside) {
    const std::string& output = other.outputs[0];
    if (other.op_type != "Concat" || !was_computed_(output) || producer(output) == nullptr)
      continue;  // nobody reads it
    ToldShape shape = {output, 0, std::vector<ToldShape::Size>(other.inputs.size())};
    for (size_t i = 0; i < shape.sizes.size(); ++i) {
      if (!size(other.inputs[i], shape.sizes[i])) return sentence("the shape \"", shape.name, "\" is not known");
    }
    wiring.shapes.push_back(std::move(shape));
  }
  return "";
}

namespace {

void add_names(const Source& source, std::vector<std::string>& names) {
  if (source.kind == Source::kTensor) names.push_back(source.name);
  for (const Source& each : source.of) add_names(each, names);
}

}  // namespace

std::vector<std::string> names_read(const Wiring& wiring) {
  std::vector<std::string> names;
  for (const auto& input : wiring.inputs) {
    if (input) add_names(*input, names);
  }
  for (const ToldShape& shape : wiring.shapes) {
    for (const ToldShape::Size& each : shape.sizes) {
      for (const ToldShape::Part& part : each.parts) names.push_back(part.of);
    }
  }
  return names;
}

}  // namespace polyhead::onnxruntime
