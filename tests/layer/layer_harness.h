// Runs a layer in guarded memory.
#pragma once

#include <functional>

#include "layer_witness.h"
#include "testing/call.h"

namespace polyhead::testing {

struct LayerRun {
  std::string kernel;
  int threads = 1;  // as in RunOptions
  Layout layout = Layout::kMixed;
  uint64_t layout_seed = 1;
  Guard guard = Guard::kEnd;
  bool training = true;      // forward with a reserve, then both backward calls; else forward alone
  bool accumulate = false;   // backward_weights adds to `before`
  LayerResults before = {};  // grad_weights, with accumulate
};

// All that the layer gives. Inputs are checked unchanged; outputs, workspace and reserve start as NaN. A call that fails
// is a fault, as is memory that was written and must not be.
LayerResults run(const LayerProblem& problem, const LayerInputs& in, const LayerRun& options);

// Out and attn_weights as single steps give them after an inference forward has filled the caches; or, with `append`,
// with each step's key and value joining the caches, which then hide what comes later.
LayerResults run_steps(const LayerProblem& problem, const LayerInputs& in, const LayerRun& options, bool append);

// Why this kernel cannot compute the problem; "" if it can.
std::string why_not(const LayerProblem& problem, const std::string& kernel);

// The same without dropout, as inference computes.
LayerProblem inference(LayerProblem problem);

// "" if all results have the same bits, else the first difference.
std::string difference(const LayerResults& a, const LayerResults& b);

// The verdict on a kernel's results by the yardstick of error (judge.h), over more draws where it fails by little. ""
// if good, else a line for each complaint.
std::string mismatch(const LayerProblem& problem, const LayerRun& options);

// The same of whatever gives the results of a draw.
using Runner = std::function<LayerResults(const LayerProblem&, const LayerInputs&)>;
std::string mismatch(const LayerProblem& problem, const Runner& runner);

}  // namespace polyhead::testing
