// Runs kernels' backward in guarded memory, and judges the gradients by the yardstick of the contract:
//
// - Largest error <= 3x the yardstick's + 4 ulp of the sum of the absolute values of the terms (gradient_magnitudes),
//   with out and logsumexp as given to both.
// - RMSE <= 1.5x the yardstick's, and no drift of the mean signed error, where there are 4096 elements or more. 2x in
//   bfloat16, where P and dS are rounded before they meet a matrix; with shifted logits no bound there, for keys then
//   have a large component in common, over which dS would sum to 0. The yardstick counts as half an ulp of float32 at
//   least, of the magnitude: where a row sees one key, it takes dP - D to be 0 exactly.
// - NaN and inf where the definition has them; +0, or what was there before, where nothing contributes; nothing unwritten
//   or overwritten.
//
// What fails by little is drawn again, as in judge.h.
#pragma once

#include <string>
#include <vector>

#include "gradient_problem.h"
#include "harness.h"
#include "poison.h"

namespace polyhead::testing {

// One call of `kernel` for the gradients `asked`: inputs checked unchanged, outputs and workspace start as NaN. The
// plan knows what no kernel need: problems of which some size is 0.
Gradients run(const Kernel& kernel, const AttentionDesc& desc, const BackwardInputs& in, const RunOptions& options = {},
              GradientSet asked = kAllGradients);

// The arguments of a call on the inputs as they are stored; the gradients are the caller's to set.
BackwardArgs dense_args(const BackwardInputs& in);

// "" if the gradients `asked` have the same bits, else the first difference.
std::string difference(const Gradients& a, const Gradients& b, GradientSet asked = kAllGradients);

// What the definition gives.
struct ExpectedGradients {
  Gradients exact;      // float64 arithmetic and results
  Gradients naive;      // the yardstick: float32 arithmetic (float64 with float64 inputs), results in their own dtypes
  Gradients magnitude;  // for each element the sum of the absolute values of its terms, float64
};
ExpectedGradients expected(const AttentionDesc& desc, const BackwardInputs& in);

// The verdict on the gradients of one draw that the problem asks for.
std::string verdict(const GradientProblem& problem, const Gradients& got, const ExpectedGradients& want,
                    const BackwardInputs& in);

// The verdict on the gradients of `kernel` that the problem asks for: of the draw `in`, and of up to 64 more if it fails
// by little. "" if good, else a line for each complaint.
std::string mismatch(const Kernel& kernel, const GradientProblem& problem, const BackwardInputs& in,
                     const ExpectedGradients& want, const RunOptions& options = {});

}  // namespace polyhead::testing
