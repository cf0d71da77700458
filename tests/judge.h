// Whether what a kernel wrote is as good as SEMANTICS.md asks, by the yardstick of error.
//
// - Largest error <= 2x the yardstick's + 4 ulp of sum_k P_k |V_k|.
// - RMSE <= 1.1x the yardstick's (1.5x in bfloat16 or with shifted logits), and no drift of the mean signed error, where
//   there are 4096 elements or more. The yardstick counts as half an ulp of float32 at least.
// - NaN and inf where the definition has them; +0 and -inf in rows that see no key; nothing unwritten or overwritten.
//
// Errors are random: with few rows an honest kernel may be unlucky where the yardstick is lucky. So what fails by little
// is drawn again, and all draws are judged as one; what is really wrong stays wrong.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "harness.h"
#include "tools/errors.h"

namespace polyhead::testing {

// The errors of one output, over any number of draws: by the judge of `polyhead verify`.
class Errors {
 public:
  using Magnitude = std::function<double(int64_t)>;  // whose ulps element n may err by

  Errors() = default;
  Errors(const char* name, const tools::Bound& bound) : errors_(name, bound) {}

  void add(const Array& got, const Array& exact, const Array& naive, const Magnitude& magnitude);
  std::string verdict() const;  // "" if good, else a line for each complaint
  bool could_be_chance() const { return errors_.could_be_chance(); }

 private:
  tools::Errors errors_;
};

// All outputs of a problem, over any number of draws.
class Judge {
 public:
  explicit Judge(const Problem& problem);
  void add(const Outputs& got, const Expected& want);
  std::string verdict() const;  // "" if good, else a line for each complaint
  bool could_be_chance() const;

 private:
  const Problem& problem_;
  Errors out_, logsumexp_, weights_, column_sums_;
  std::vector<std::string> faults_;
};

// How often a problem that fails by little is drawn again.
int64_t num_redraws(const AttentionDesc& desc);

// The verdict on one draw.
std::string mismatch(const Outputs& got, const Expected& want, const Problem& problem);

// The verdict on `kernel`: of the draw `in`, and of up to 64 more if it fails by little.
std::string mismatch(const Kernel& kernel, const Problem& problem, const Inputs& in, const Expected& want,
                     const RunOptions& options = {});

}  // namespace polyhead::testing
