// Gradients of random problems on every kernel of this machine: sizes 0..130 and more, all options mixed, any layout.
//
//   POLYHEAD_RANDOM_PROBLEMS=20000 gradient_random_test                         this many
//   POLYHEAD_RANDOM_SEED=42 POLYHEAD_RANDOM_PROBLEMS=1 gradient_random_test     that one
//   POLYHEAD_TEST_KERNEL=cpu_avx2 gradient_random_test                          that kernel alone
#include <gtest/gtest.h>

#include "every_kernel.h"
#include "gradient_poison.h"
#include "kernels_to_test.h"
#include "random_problems.h"
#include "testing/judge.h"
#include "testing/problem_words.h"

namespace polyhead::testing {
namespace {

// Everything that one problem shows of a kernel; "" if all is well.
std::string trouble(const Kernel& kernel, const Problem& p, const std::vector<BackwardDraw>& draws) {
  const AttentionDesc& d = draws.front().desc;
  const BackwardInputs& in = draws.front().in;
  const uint64_t seed = p.seed;
  Random random(seed ^ 0x5DEECE66D);
  const RunOptions options = run_options(p);
  if (!memory_alone()) {
    if (const std::string text = mismatch(kernel, p, draws, options); !text.empty()) return text;
  }

  RunOptions other = options;
  other.layout = Layout::kMixed;
  other.threads = static_cast<int>(random.integer(0, 4));
  other.layout_seed = seed + 1;
  const Gradients clean = run(kernel, d, in, other);
  if (!clean.faults.empty()) return clean.faults.front();
  if (const std::string text = difference(run(kernel, d, in, options, p.needs), clean, p.needs); !text.empty()) {
    return "other bits with another layout, " + std::to_string(other.threads) +
           " threads or with all gradients asked for: " + text;
  }
  if (memory_alone()) return "";
  const BackwardInputs poisoned = poison_hidden(d, in, seed);
  if (const std::string text = difference(run(kernel, d, poisoned, options), clean); !text.empty()) {
    return "what is hidden leaks: " + text;
  }
  const auto poke = static_cast<GradientPoke>(random.integer(0, kNumGradientPokes - 1));
  const PokedBackward poked = poke_visible(d, in, poke, seed);
  if (!poked.done || d.dropout_p >= 1) return "";
  const std::string text = poke_mismatch(poked, clean, run(kernel, d, poked.inputs, options));
  return text.empty() ? "" : poked.where + ": " + text;
}

TEST(GradientRandom, ProblemsAreComputedAsDefined) {
  for_random_problems(2500, [](const Problem& p, const std::vector<const Kernel*>& kernels, auto report) {
    std::vector<BackwardDraw> draws;
    if (memory_alone()) draws.push_back({problem_desc(p), random_backward_inputs(p), {}});
    if (!memory_alone()) draws = backward_draws(p);
    for (const Kernel* kernel : kernels) {
      report(*kernel, backward_command(kernel->name, p), [&] { return trouble(*kernel, p, draws); });
    }
  });
}

}  // namespace
}  // namespace polyhead::testing
