#include "claims.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "core/sentence.h"
#include "graph_nodes.h"

namespace polyhead::onnxruntime {
namespace {

constexpr int64_t kFirstWithAttention = 23;

bool is_float_type(graph::ElementType type) {
  DType dtype;
  return dtype_of(type, dtype) && dtype <= DType::kFloat64;
}

class Finder {
 public:
  explicit Finder(const OrtModel& from) : from_(from), graph_(from.model.graph) {
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      places_[graph_.nodes[i].name] = i;
      for (const std::string& output : graph_.nodes[i].outputs) {
        if (!output.empty()) producers_[output] = i;
      }
      for (const std::string& input : graph_.nodes[i].inputs) {
        if (!input.empty()) readers_[input].push_back(i);
      }
    }
    for (const graph::ValueInfo& output : graph_.outputs) outputs_.insert(output.name);
  }

  Claims find() {
    for (size_t i = 0; i < graph_.nodes.size(); ++i) claim_node(i);
    claim_groups();
    return std::move(out_);
  }

 private:
  graph::ElementType type_of(const std::string& value) const {
    const auto at = from_.types.find(value);
    return at == from_.types.end() ? graph::ElementType::kUnknown : at->second;
  }

  int64_t opset() const {
    for (const graph::OpsetImport& import : from_.model.opsets) {
      if (import.domain.empty()) return import.version;
    }
    return 0;
  }

  // A node that is one of the operators itself.
  void claim_node(size_t at) {
    const graph::Node& node = graph_.nodes[at];
    for (const OperatorNames& names : kOperators) {
      if (node.op_type != names.name || node.domain != names.domain || node.inputs.empty()) continue;
      if (node.domain.empty() && opset() < kFirstWithAttention) return;
      Claim claim;
      claim.nodes = {at};
      for (const std::string& input : node.inputs) {
        claim.wiring.inputs.push_back(input.empty() ? nullptr : std::make_unique<Source>(Source{.name = input}));
      }
      for (const std::string& output : node.outputs) {
        claim.wiring.outputs.push_back(output.empty() ? nullptr : std::make_unique<Target>(Target{output, 0, {}}));
      }
      tell(node.name, finish(claim, names.op, node), sentence(names.name, " as it is"));
      return;
    }
  }

  // The operator `node` with the claim's wiring. A sentence if it cannot run here.
  std::string finish(Claim& claim, Operator op, const graph::Node& node) {
    NodeFacts facts{op};
    for (size_t i = 0; i < claim.wiring.inputs.size(); ++i)
      facts.given |= uint32_t{claim.wiring.inputs[i] != nullptr} << i;
    for (size_t i = 0; i < claim.wiring.outputs.size(); ++i)
      facts.wanted |= uint32_t{claim.wiring.outputs[i] != nullptr} << i;
    if (!claim.wiring.outputs[0] && op != Operator::kAttentionGrad) return "its first output is left out";
    const Source* query = claim.wiring.inputs[0].get();
    while (query != nullptr && !query->of.empty()) query = &query->of.front();
    const graph::ElementType type = type_of(query != nullptr ? query->name : "");
    if (!is_float_type(type) || !dtype_of(type, claim.wiring.dtype)) {
      return sentence("its query has element type ", static_cast<int32_t>(type));
    }
    const Result<Node> made = Node::make(facts, GraphAttributes(node));
    if (!made.ok()) return made.status().message();
    claim.node = *made;
    out_.claims.push_back(std::move(claim));
    return "";
  }

  void tell(const std::string& place, const std::string& reason, const std::string& became) {
    out_.told.push_back(place + (reason.empty() ? ": " + became : ": stays, " + reason));
  }

  // Nodes that src/graph replaces by one of our own Attention.
  void claim_groups() {
    graph::Model fused = from_.model;
    // A group reads what its nodes read: of a mask that several layers share, no part.
    const graph::Report report =
        graph::fuse(fused, {graph::Target::kPolyhead, graph::UnseenRows::kKeep, graph::Backwards::kOfNobody, false});
    for (const graph::Candidate& each : report.candidates) {
      if (!each.fused && each.is_attention) tell(each.place, each.reason, "");
    }
    std::unordered_set<std::string> kept;
    for (const graph::Node& node : fused.graph.nodes) kept.insert(node.name);
    const GraphNodes nodes(
        fused, [&](const graph::Node& node) { return !places_.contains(node.name); },
        [&](const std::string& value) { return producers_.contains(value); });
    std::unordered_map<std::string_view, const graph::Candidate*> candidates;
    for (const graph::Candidate& each : report.candidates) {
      for (const graph::Node& node : each.after) candidates[node.name] = &each;
    }
    std::vector<Claim> claims;
    std::vector<const graph::Node*> operators;
    std::unordered_map<size_t, int> times_met;
    for (const graph::Node& node : fused.graph.nodes) {
      if (places_.contains(node.name) || node.op_type != "Attention") continue;
      Claim claim;
      const std::string reason = nodes.wire(node, candidates.at(node.name)->after, claim.wiring);
      if (!reason.empty()) {
        tell(node.name, reason, "");
        continue;
      }
      claim.nodes = behind(claim, kept);
      for (size_t each : claim.nodes) ++times_met[each];
      claims.push_back(std::move(claim));
      operators.push_back(&node);
    }
    for (size_t i = 0; i < claims.size(); ++i) {
      // What several would replace stays for all of them.
      std::erase_if(claims[i].nodes, [&](size_t each) { return times_met[each] > 1; });
      const std::string place = claims[i].wiring.outputs[0] ? claims[i].wiring.outputs[0]->name : operators[i]->name;
      std::string reason = why_no_group(claims[i]);
      const size_t count = claims[i].nodes.size();
      if (reason.empty()) reason = finish(claims[i], Operator::kAttention, *operators[i]);
      tell(place, reason, sentence("Attention in the place of ", count, " nodes"));
    }
  }

  // The nodes that went away, from the claim's outputs upwards.
  std::vector<size_t> behind(const Claim& claim, const std::unordered_set<std::string>& kept) const {
    std::vector<std::string> values;
    std::unordered_set<size_t> met;
    for (const auto& output : claim.wiring.outputs) {
      if (output) values.push_back(output->name);
    }
    for (const ToldShape& shape : claim.wiring.shapes) values.push_back(shape.name);
    while (!values.empty()) {
      const auto at = producers_.find(values.back());
      values.pop_back();
      if (at == producers_.end() || kept.contains(graph_.nodes[at->second].name) || !met.insert(at->second).second)
        continue;
      for (const std::string& input : graph_.nodes[at->second].inputs) values.push_back(input);
    }
    std::vector<size_t> nodes(met.begin(), met.end());
    std::sort(nodes.begin(), nodes.end());
    return nodes;
  }

  // A group has the edges that its nodes have, and none of them leads out and in again.
  std::string why_no_group(const Claim& claim) const {
    const std::unordered_set<size_t> group(claim.nodes.begin(), claim.nodes.end());
    std::unordered_set<std::string> made, read, given;
    for (size_t i : claim.nodes) {
      made.insert(graph_.nodes[i].outputs.begin(), graph_.nodes[i].outputs.end());
      read.insert(graph_.nodes[i].inputs.begin(), graph_.nodes[i].inputs.end());
    }
    for (const auto& output : claim.wiring.outputs) {
      if (output) given.insert(output->name);
      if (output && !made.contains(output->name))
        return sentence("\"", output->name, "\" is made by another attention too");
    }
    for (const ToldShape& shape : claim.wiring.shapes) given.insert(shape.name);
    for (const std::string& name : names_read(claim.wiring)) {
      if (made.contains(name) || !read.contains(name))
        return sentence("it reads \"", name, "\", which is no edge of its nodes");
    }
    std::vector<size_t> next;
    for (const std::string& name : made) {
      if (name.empty() || given.contains(name)) continue;
      if (outputs_.contains(name)) return sentence("\"", name, "\" is an output of the model too");
      for (size_t reader : readers_of(name)) {
        if (!group.contains(reader))
          return sentence("\"", name, "\" is read by \"", graph_.nodes[reader].name, "\" too");
      }
    }
    for (const std::string& name : given) {
      for (size_t reader : readers_of(name)) {
        if (!group.contains(reader)) next.push_back(reader);
      }
    }
    std::unordered_set<size_t> met;
    while (!next.empty()) {
      const size_t at = next.back();
      next.pop_back();
      if (group.contains(at)) return "one of its nodes depends on its output";
      if (!met.insert(at).second) continue;
      for (const std::string& name : graph_.nodes[at].outputs) {
        const auto& readers = readers_of(name);
        next.insert(next.end(), readers.begin(), readers.end());
      }
    }
    return "";
  }

  const std::vector<size_t>& readers_of(const std::string& value) const {
    static const std::vector<size_t> none;
    const auto at = readers_.find(value);
    return at == readers_.end() ? none : at->second;
  }

  const OrtModel& from_;
  const graph::Graph& graph_;
  std::unordered_map<std::string, size_t> places_, producers_;
  std::unordered_map<std::string, std::vector<size_t>> readers_;
  std::unordered_set<std::string> outputs_;
  Claims out_;
};

}  // namespace

Claims find_claims(const OrtModel& from) { return Finder(from).find(); }

}  // namespace polyhead::onnxruntime
