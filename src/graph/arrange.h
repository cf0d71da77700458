// Which values the operator reads, in which form, and which value it gives.
#pragma once

#include <string>
#include <vector>

#include "graph/layout.h"
#include "graph/match.h"

namespace polyhead::graph {

// The value that gets one of the operator's results, and what is done to the result for it.
struct Landing {
  int value = kNone;
  std::vector<int> passed = {};    // nodes between the product and that value, which go away
  std::vector<size_t> order = {};  // it is a transpose; empty: it is not
  bool merges = false;             // it is [batch * heads, sequence, dim] of [batch, heads, sequence, dim]
};

struct Arrangement {
  enum Kind {
    kStacks,  // 4-D: [batch, heads, sequence, dim]
    kFlat,    // 3-D: [batch, sequence, heads * dim]; with one head where batch and heads are one dim
  };
  Kind kind = kStacks;
  Form query, key, value;
  Form grad_out = {};  // of a match with a backward; its gradients are left out where value is kNone
  Landing out = {}, grad_query = {}, grad_key = {}, grad_value = {};
  std::string reason = {};  // why there is none
};

Arrangement arrange(const Net& net, const Match& match);

// Why what others read of the scores or weights has not the operator's dims, type and numbers; "" if it has, or none is read.
std::string why_not_returned(const Net& net, const Match& match, bool by_onnx);

// A mask for the scores of the arrangement.
struct ArrangedMask {
  int value = kNone;               // the same, or one above it; kNone: there is none
  std::vector<int64_t> lead = {};  // it is reshaped to these two and its last two dims; empty: it is not
  bool repeats = false;            // and then repeated as a whole, until it has the batch of the query
};
ArrangedMask arranged_mask(const Net& net, const Arrangement& arrangement, const MaskTerm& term);

}  // namespace polyhead::graph
