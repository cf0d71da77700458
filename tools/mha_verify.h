// A layer's results against the plain loops of layer_truth.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mha_operands.h"
#include "mha_problem.h"
#include "report.h"
#include "selection.h"
#include "testing/errors.h"
#include "testing/layer_truth.h"

namespace polyhead::tools {

// What a problem's calls should write.
struct MhaTruth {
  MhaOperands operands;
  LayerNumbers numbers;  // of the operands
  LayerTruth results;
};
Result<MhaTruth> mha_truth(const MhaProblem& problem, const Layer& layer);

// What calls wrote, in one draw of operands or several.
class MhaJudge {
 public:
  explicit MhaJudge(const MhaProblem& problem);
  void add(const LayerTruth& truth, const MhaResults& got);

  std::vector<Verdict> verdicts() const;

 private:
  double rows_ = 1;    // of queries, of all heads: each errs by itself
  bool one_rounding_;  // all weights P are alike, and so is what rounding them to bfloat16 does to gradients
  std::vector<Errors> judged_;
};

struct MhaVerification {
  std::vector<std::string> kernels;
  std::vector<Threads> threads;
  Format format = Format::kMarkdown;
};

// `polyhead mha --verify`: prints the report, and gives the exit code.
Result<int> verify_mha(const MhaProblem& problem, const MhaVerification& how);
// The same of `count` random layers.
Result<int> verify_random_mha(uint64_t seed, int64_t count, const MhaVerification& how);

}  // namespace polyhead::tools
