// Nodes and constants that a rewrite adds. What was computed before, for this attention or another one of the graph, is
// there already and is not made again.
#pragma once

#include <string>
#include <vector>

#include "graph/rewrite.h"

namespace polyhead::graph {

Attribute integer(std::string name, int64_t value);
Attribute number(std::string name, double value);
Attribute text(std::string name, std::string value);
Attribute list(std::string name, std::vector<int64_t> values);
Attribute perm(const std::vector<size_t>& order);

class NewNodes {
 public:
  // Numbers are of `type`.
  NewNodes(const Emission& emission, ElementType type, Rewrite& rewrite)
      : e_(emission), type_(type), rewrite_(rewrite) {}

  // The output's name.
  std::string add(const char* op_type, std::vector<std::string> inputs, std::vector<Attribute> attributes = {});
  std::string add_as(std::string output, const char* op_type, std::vector<std::string> inputs,
                     std::vector<Attribute> attributes = {});

  std::string integers(const std::vector<int64_t>& elements);
  std::string constant(double scalar);
  std::string numbers(const std::vector<double>& elements);
  std::string unsqueeze(const std::string& name, std::vector<int64_t> axes);
  std::string shape_of(const std::string& name, int64_t start, int64_t end);

  template <class Make>
  std::string once(const std::string& what, const Make& make) {
    if (const auto found = e_.made.find(what); found != e_.made.end()) return found->second;
    if (const auto found = rewrite_.made.find(what); found != rewrite_.made.end()) return found->second;
    return rewrite_.made[what] = make();
  }

 private:
  const Emission& e_;
  ElementType type_;
  Rewrite& rewrite_;
};

}  // namespace polyhead::graph
