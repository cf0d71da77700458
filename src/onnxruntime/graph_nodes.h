// The nodes that src/graph puts in the place of an attention or a product, read as wiring of one operator.
#pragma once

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "node.h"
#include "polyhead/graph.h"
#include "wiring.h"

namespace polyhead::onnxruntime {

class GraphAttributes final : public Attributes {
 public:
  explicit GraphAttributes(const graph::Node& node) : node_(node) {}
  std::optional<int64_t> integer(const char* name) const override;
  std::optional<float> number(const char* name) const override;
  std::optional<std::string> text(const char* name) const override;

 private:
  const graph::Node& node_;
};

class GraphNodes {
 public:
  // Of a model after fuse(): which nodes are new, and which values old nodes computed before.
  GraphNodes(const graph::Model& model, const std::function<bool(const graph::Node&)>& is_new,
             std::function<bool(const std::string&)> was_computed);

  // The wiring of a new operator, beside which these new nodes stand; a sentence if one of those around it is none that it
  // can say. An input that it keeps, by the names at their places, is left out.
  std::string wire(const graph::Node& node, const std::vector<std::string>& kept,
                   const std::vector<graph::Node>& beside, Wiring& wiring) const;

 private:
  std::string source(const std::string& value, Source& to) const;
  std::string target(std::string value, Target& to) const;
  bool size(const std::string& value, ToldShape::Size& to) const;
  const graph::Node* producer(const std::string& value) const;
  bool integers(const std::string& name, std::vector<int64_t>& to) const;
  bool number(const std::string& name, double& to) const;
  bool axes(const graph::Node& node, std::vector<int64_t>& to) const;

  std::function<bool(const std::string&)> was_computed_;
  std::unordered_map<std::string, const graph::Node*> producers_;  // of the new nodes
  std::unordered_map<std::string, const graph::Node*> readers_;    // new nodes by their first input
  std::unordered_map<std::string, const graph::Constant*> constants_;
};

// The tensors that it reads.
std::vector<std::string> names_read(const Wiring& wiring);

}  // namespace polyhead::onnxruntime
