// Runs a layer in guarded memory.
#pragma once

#include <deque>
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

// The draws of one problem, as many as its rows tell. The formulas are computed once for all kernels.
class LayerDraws {
 public:
  explicit LayerDraws(const LayerProblem& problem, bool training = true) : problem_(problem), training_(training) {}

  // "" if what `run` gives for each draw is good, judged as one by the yardstick of error (testing/judge.h), else a line
  // for each complaint. Where only memory counts: of the first draw, what the call itself finds wrong.
  std::string judge(const std::function<LayerResults(const LayerProblem&, const LayerInputs&)>& run);
  std::string judge(const LayerRun& options);

 private:
  struct Draw {
    LayerProblem problem;
    LayerInputs in;
    ExpectedLayer want;
  };
  const Draw& draw(int64_t n);

  LayerProblem problem_;
  bool training_;
  std::deque<Draw> draws_;
};

}  // namespace polyhead::testing
