// What becomes of a match's masks: options of the operator, and tensors where they are more than those can say.
#pragma once

#include <string>
#include <vector>

#include "graph/match.h"

namespace polyhead::graph {

struct MaskRules {
  bool with_windows = false;  // the operator has windows, not only a causal mask
  UnseenRows unseen_rows = UnseenRows::kKeep;
  Size before = {0, {}};  // keys of earlier runs: row i stands at place before + i
  bool splits = true;     // a part of a mask may be an option, and another one a tensor
};

struct Masks {
  bool is_causal = false;
  int64_t left = -1, right = -1;  // keys that a query sees before and behind its own place; -1: all
  std::vector<MaskTerm> terms = {};
  std::vector<std::string> words = {};
};

// The same rows of weights as match.terms give, for all shapes.
Masks masks_of(const Net& net, const Match& match, const MaskRules& rules);

}  // namespace polyhead::graph
