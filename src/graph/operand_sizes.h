// Sizes of an arrangement's operands when the model runs, and shapes that are made of them.
#pragma once

#include "graph/arrange.h"
#include "graph/new_nodes.h"

namespace polyhead::graph {

class OperandSizes {
 public:
  // `joins`: key and value are what the operator joins to those of earlier runs (cached.h).
  OperandSizes(const Net& net, const Arrangement& plan, bool joins, NewNodes& new_nodes)
      : net_(net), plan_(plan), joins_(joins), new_(new_nodes) {}

  // The value of one element that has the size of a dim of the form's value.
  std::string of(const Form& form, size_t dim);

  // Nodes of `rewrite` that give the shapes of what the match takes away, in the place of those that read them. A
  // sentence where one is not made of the operands' sizes.
  std::string tell(const Match& match, Rewrite& rewrite);

 private:
  std::vector<int> shapes_of(const Operand& operand, int reader, const Form& form) const;
  std::vector<std::string> sizes_of(int shape);

  const Net& net_;
  const Arrangement& plan_;
  bool joins_;
  NewNodes& new_;
};

}  // namespace polyhead::graph
