// Lengths that lie on the device are never trusted: what they say beyond a sequence is cut off, in attention and where padding
// is left out of products.
#include <gtest/gtest.h>

#include <algorithm>

#include "device_under_test.h"
#include "layer_harness.h"

namespace polyhead::testing {
namespace {

TEST(CudaLayer, CutsLengthsOff) {
  int num_run = 0;
  for (LayerProblem problem : layer_problems()) {
    const AttentionDesc& a = problem.desc.attention;
    if (!a.has_seqlens_q && !a.has_seqlens_k) continue;
    SCOPED_TRACE(problem.name);
    LayerInputs cut = random_inputs(problem), beyond = cut;
    const auto replace = [](Array& whole, Array& wild, int64_t steps) {
      for (int64_t n = 0; n < whole.size(); ++n) {
        if (n % 3 == 0)
          whole.set(n, static_cast<double>(steps)), wild.set(n, static_cast<double>(steps + 1000 * n + 1));
        if (n % 3 == 1) whole.set(n, 0), wild.set(n, static_cast<double>(-7 - n));
      }
    };
    replace(cut.seqlens_q, beyond.seqlens_q, problem.desc.seqlen_q);
    replace(cut.seqlens_k, beyond.seqlens_k, problem.desc.seqlen_k);
    const LayerRun on_cuda{.kernel = device_under_test.kernel, .layout_seed = problem.seed};
    EXPECT_EQ(difference(run(problem, beyond, on_cuda), run(problem, cut, on_cuda)), "");
    ++num_run;
  }
  EXPECT_GT(num_run, 2);
}

}  // namespace
}  // namespace polyhead::testing
