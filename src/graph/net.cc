#include "graph/net.h"

#include <unordered_set>

#include "graph/checks.h"
#include "graph/infer.h"

namespace polyhead::graph {

Net::Net(const Model& model, const Graph& graph, Symbols& symbols, const Net* outer)
    : graph_(graph), symbols_(symbols), outer_(outer), opset_(opset_of(model)) {
  std::unordered_set<std::string_view> given;
  for (const ValueInfo& input : graph.inputs) {
    declare(input);
    given.insert(input.name);
  }
  for (const Constant& constant : graph.initializers) {
    Facts& facts = values_[static_cast<size_t>(value_named(constant.name))].facts;
    const bool is_default = model.ir_version >= 4 && given.contains(constant.name);  // a caller may give another
    if (!is_default) facts = facts_of(constant);
  }
  std::unordered_map<std::string_view, const ValueInfo*> told;
  for (const ValueInfo& value : graph.values) told[value.name] = &value;
  for (const ValueInfo& value : graph.outputs) told.try_emplace(value.name, &value);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    const int index = static_cast<int>(i);
    for (const std::string& name : node.inputs) {
      inputs_.resize(i + 1);
      inputs_[i].push_back(name.empty() ? kNone : value_named(name));
    }
    inputs_.resize(i + 1);
    outputs_.resize(i + 1);
    for (int id : inputs_[i]) {
      if (id == kNone) continue;
      auto& users = values_[static_cast<size_t>(id)].users;
      if (users.empty() || users.back() != index) users.push_back(index);
    }
    for (const Attribute& attribute : node.attributes) {
      for (const Graph& body : attribute.graphs) add_uses(body, index);
    }
    for (const std::string& name : node.outputs) {
      outputs_[i].push_back(name.empty() ? kNone : value_named(name));
      if (!name.empty()) values_[static_cast<size_t>(outputs_[i].back())].producer = index;
    }
    std::vector<Facts> results(outputs_[i].size());
    infer(*this, index, results);
    for (size_t k = 0; k < results.size(); ++k) {
      if (outputs_[i][k] == kNone) continue;
      NetValue& value = values_[static_cast<size_t>(outputs_[i][k])];
      const auto found = told.find(value.name);
      value.facts = std::move(results[k]);
      if (found != told.end()) add_told(symbols_, *found->second, value.facts);
    }
  }
  for (const ValueInfo& output : graph.outputs) values_[static_cast<size_t>(value_named(output.name))].is_output = true;
}

int Net::value_named(std::string_view name) {
  const auto [at, is_new] = ids_.try_emplace(name, static_cast<int>(values_.size()));
  if (is_new) {
    values_.push_back({name});
    if (const NetValue* around = outer_ == nullptr ? nullptr : outer_->find(name)) {
      values_.back().facts = around->facts;
      values_.back().is_outer = true;
    }
  }
  return at->second;
}

const NetValue* Net::find(std::string_view name) const {
  const auto at = ids_.find(name);
  if (at != ids_.end()) return &values_[static_cast<size_t>(at->second)];
  return outer_ == nullptr ? nullptr : outer_->find(name);
}

// What a body reads, its own values left aside: names that are not known yet are its own.
void Net::add_uses(const Graph& body, int node) {
  const auto use = [&](const std::string& name) {
    const auto at = ids_.find(name);
    if (at == ids_.end()) return;
    auto& users = values_[static_cast<size_t>(at->second)].users;
    if (users.empty() || users.back() != node) users.push_back(node);
  };
  for (const Node& inner : body.nodes) {
    for (const std::string& name : inner.inputs) use(name);
    for (const Attribute& attribute : inner.attributes) {
      for (const Graph& deeper : attribute.graphs) add_uses(deeper, node);
    }
  }
  for (const ValueInfo& output : body.outputs) use(output.name);
}

void Net::declare(const ValueInfo& told) {
  Facts& facts = values_[static_cast<size_t>(value_named(told.name))].facts;
  facts = {};
  add_told(symbols_, told, facts);
}

std::span<const Size> Net::shape(int id) const {
  if (id == kNone || !facts(id).shape) return {};
  return *facts(id).shape;
}

int Net::rank(int id) const { return id == kNone || !facts(id).shape ? -1 : static_cast<int>(facts(id).shape->size()); }

const Attribute* attribute_of(const Node& node, std::string_view name) {
  for (const Attribute& attribute : node.attributes) {
    if (attribute.name == name) return &attribute;
  }
  return nullptr;
}

int64_t integer_of(const Node& node, std::string_view name, int64_t otherwise) {
  const Attribute* found = attribute_of(node, name);
  return found == nullptr ? otherwise : found->integer.value_or(otherwise);
}

std::optional<size_t> axis_of(int64_t axis, size_t rank) {
  const auto count = static_cast<int64_t>(rank);
  if (axis < -count || axis >= count) return std::nullopt;
  return static_cast<size_t>(axis < 0 ? axis + count : axis);
}

std::optional<std::vector<int64_t>> axes_of(const Net& net, int node) {
  if (const Attribute* axes = attribute_of(net.node(node), "axes")) return axes->integers;
  const int id = net.input(node, 1);
  if (id == kNone || !net.facts(id).elements) return std::nullopt;
  std::vector<int64_t> axes;
  for (const Size& each : *net.facts(id).elements) {
    if (!each.is_constant()) return std::nullopt;
    axes.push_back(each.factor);
  }
  return axes;
}

}  // namespace polyhead::graph
