// Which values the operator reads, in which form, and which value it gives.
#pragma once

#include <string>
#include <vector>

#include "graph/layout.h"
#include "graph/match.h"

namespace polyhead::graph {

struct Arrangement {
  enum Kind {
    kStacks,    // 4-D: [batch, heads, sequence, dim]
    kFlat,      // 3-D: [batch, sequence, heads * dim]
    kOneBatch,  // 3-D stacks [batch * heads, sequence, dim] as the heads of one batch
  };
  Kind kind = kStacks;
  Form query, key, value;
  int out = kNone;               // the value that the operator computes
  std::vector<int> passed = {};  // nodes between the product and that value, which go away
  bool transposes_out = false;   // of kStacks: `out` is the product's result in the order match.result.out
  bool merges_out = false;       // of kStacks: `out` is [batch * heads, sequence, dim]
  std::string reason = {};       // why there is none
};

Arrangement arrange(const Net& net, const Match& match);

// A mask for the scores of the arrangement.
struct ArrangedMask {
  int value = kNone;    // the same, or one above it; kNone: there is none
  bool is_cut = false;  // it is [batch * heads, ...] and needs a reshape to [batch, heads, ...]
};
ArrangedMask arranged_mask(const Net& net, const Arrangement& arrangement, const MaskTerm& term);

}  // namespace polyhead::graph
