// A kernel's results against the definition.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "operands.h"
#include "problem.h"

namespace polyhead::tools {

// What the definition gives for a problem's operands.
struct Truth {
  Inputs inputs;
  Outputs exact;      // float64 arithmetic and results
  Outputs yardstick;  // the naive loops in float32 (float64 for float64 operands), rounded to the results' dtypes
  Outputs magnitude;  // out is sum_k P_k |V_k|, in float64
};
// logsumexp is always asked for.
Result<Truth> compute_truth(const Problem& problem);

// One output tensor's error. Allowed (docs/semantics.md, "Yardstick"): twice the yardstick's largest error, plus 4 ulp
// of what was summed. NaN and inf must stand where the definition has them.
struct Verdict {
  std::string output;  // "out", "logsumexp", ...
  double largest_error = 0;
  double allowed = 0;  // at the element that comes closest to its own limit, or passes it furthest
  bool passed = true;
  std::string fault;  // of the first element that failed, with its index
};
std::vector<Verdict> judge(const Truth& truth, const Outputs& got);

// Any legal problem: all options mixed, sizes 0 to 130, small enough for the naive loops.
Problem random_problem(uint64_t seed);

}  // namespace polyhead::tools
