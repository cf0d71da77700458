// A kernel's results against the definition.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "errors.h"
#include "gradients.h"
#include "operands.h"
#include "problem.h"

namespace polyhead::tools {

// What the definition gives for a problem's operands.
struct Truth {
  Inputs inputs;
  Outputs exact;      // float64 arithmetic and results
  Outputs yardstick;  // the naive loops in float32 (float64 for float64 operands), rounded to the results' dtypes
  std::vector<double> magnitude;  // of out: sum_k P_k |V_k|
};
// logsumexp is always asked for.
Result<Truth> compute_truth(const Problem& problem);

// Likewise its gradients: those that the problem needs.
struct GradientTruth {
  Inputs inputs;
  Incoming incoming;
  Outputs saved;  // out and logsumexp that every backward call is given: the exact ones, rounded to their dtypes
  GradientSet needs = 0;
  Gradients exact, yardstick;
  std::vector<double> magnitude[kNumGradients];  // the sum of the absolute values of the terms; 0 where there is none
};
Result<GradientTruth> compute_gradient_truth(const Problem& problem);

// The backward call that `truth` is the truth of; without gradients and workspace.
BackwardArgs backward_args(const Problem& problem, const GradientTruth& truth);

struct Verdict {
  std::string output;             // "out", "grad_query", ...
  double error = 0, allowed = 0;  // of the element that fails worst, else of the one with the largest error
  bool passed = true;
  std::string fault;  // the first complaint
};

Verdict verdict_of(const Errors& errors);

// What a kernel wrote for a problem, in one draw of operands or several.
class Judge {
 public:
  void add(const Truth& truth, const Outputs& got);
  void add(const GradientTruth& truth, const Gradients& got);

  std::vector<Verdict> verdicts() const;
  bool passed() const;
  bool could_be_chance() const;  // more draws will tell

 private:
  Errors& errors(const char* name, const Bound& bound);
  std::vector<Errors> errors_;
};

// Any legal problem: all options mixed, sizes 0 to 130, small enough for the naive loops.
Problem random_problem(uint64_t seed);

}  // namespace polyhead::tools
