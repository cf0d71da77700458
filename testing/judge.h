// Whether what a kernel wrote is as good as docs/semantics.md asks, by the yardstick of error (errors.h, bounds.h).
//
// - Largest error <= 2x the yardstick's (gradients 3x) + 4 ulp of the sum of the absolute values of the terms: of out
//   sum_k P_k |V_k|. Gradients: with out and logsumexp as given to both.
// - RMSE and mean signed error, as errors.h has them.
// - NaN and inf where the definition has them; +0 and -inf in rows that see no key, and in gradients where nothing
//   contributes +0 or what was there before; nothing unwritten or overwritten.
//
// Rounding errors are random. So a problem of few rows is judged by several draws of its numbers, as many as its sizes
// tell (num_draws), all drawn before the one verdict on all of them.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "testing/call.h"
#include "testing/errors.h"

namespace polyhead::testing {

// The outputs or gradients of a problem, over any number of draws.
class Judge {
 public:
  // pairs: of a kernel that multiplies_pairs(). cut: of one that sums_on_tensor_cores().
  explicit Judge(const Problem& problem, bool pairs = false, bool cut = false);
  void add(const AttentionDesc& desc, const Outputs& got, const Expected& want);
  void add(const AttentionDesc& desc, const Gradients& got, const ExpectedGradients& want, const BackwardInputs& in);

  std::string verdict() const;            // "" if good, else a line for each complaint
  std::vector<Verdict> verdicts() const;  // of each output that was judged; faults beside them have one each

 private:
  const Problem& problem_;
  bool pairs_, cut_;
  Errors out_, logsumexp_, weights_, column_sums_;
  std::array<Errors, kNumGradients> gradients_;
  std::vector<Errors> captures_;  // gradients of what the program captures
  std::vector<std::string> faults_;
};

// Adds the errors of `got`, whose element n may err by ulps of magnitude[n]. exact is float64. variance, pairs, cut:
// as in Measured, float64; null: none.
void add_errors(Errors& errors, const Array& got, const Array& exact, const Array& naive,
                std::span<const double> magnitude, const Array* variance = nullptr, const Array* pairs = nullptr,
                const Array* cut = nullptr);

// As many as give `enough` rows of queries in all heads, at most 8. The seed of draw 0 is the problem's own.
int64_t num_draws(int64_t rows, int64_t enough = 256);
int64_t num_draws(const AttentionDesc& desc);
uint64_t seed_of_draw(uint64_t seed, int64_t n);

// What kernels are judged by: shared by all of them.
struct ForwardDraw {
  AttentionDesc desc;
  Inputs in;
  Expected want;
};
std::vector<ForwardDraw> forward_draws(const Problem& problem);  // as many as its sizes tell

struct BackwardDraw {
  AttentionDesc desc;
  BackwardInputs in;
  ExpectedGradients want;
};
std::vector<BackwardDraw> backward_draws(const Problem& problem);

// The judge who has seen what `kernel` makes of all draws.
Judge judged(const Kernel& kernel, const Problem& problem, const std::vector<ForwardDraw>& draws,
             const RunOptions& options = {});
Judge judged(const Kernel& kernel, const Problem& problem, const std::vector<BackwardDraw>& draws,
             const RunOptions& options = {});

// The verdict on `kernel`, "" if good.
template <class Draw>
std::string mismatch(const Kernel& kernel, const Problem& problem, const std::vector<Draw>& draws,
                     const RunOptions& options = {}) {
  return judged(kernel, problem, draws, options).verdict();
}

}  // namespace polyhead::testing
