// The operator's mask, of all those that a match has.
#pragma once

#include <string>

#include "graph/operand_sizes.h"

namespace polyhead::graph {

struct AttnMask {
  std::string name;         // the sum, or the conjunction, of all terms; "": there are none
  bool broadcasts = false;  // its column, if it turns out to have but one, is for all keys
  std::string reason;       // why the operator cannot take it
};

AttnMask attn_mask_of(const Net& net, const Match& match, const Arrangement& plan, Target target, OperandSizes& sizes,
                      NewNodes& new_nodes);

}  // namespace polyhead::graph
