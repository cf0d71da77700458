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

// What a problem has in common for all kernels.
struct Drawn {
  const Problem& problem;
  std::vector<BackwardDraw> draws;
  RunOptions other;  // than the problem's own
  BackwardInputs poisoned;
  PokedBackward poked;

  explicit Drawn(const Problem& p) : problem(p), other(run_options(p)) {
    Random random(p.seed ^ 0x5DEECE66D);
    other.layout = Layout::kMixed;
    other.threads = static_cast<int>(random.integer(0, 4));
    other.layout_seed = p.seed + 1;
    if (memory_alone()) {
      draws.push_back({problem_desc(p), random_backward_inputs(p), {}});
      return;
    }
    draws = backward_draws(p);
    const BackwardDraw& first = draws.front();
    poisoned = poison_hidden(first.desc, first.in, p.seed);
    const auto poke = static_cast<GradientPoke>(random.integer(0, kNumGradientPokes - 1));
    if (first.desc.dropout_p < 1) poked = poke_visible(first.desc, first.in, poke, p.seed);
  }
};

// Everything that one problem shows of a kernel; "" if all is well.
std::string trouble(const Kernel& kernel, const Drawn& drawn) {
  const AttentionDesc& d = drawn.draws.front().desc;
  const BackwardInputs& in = drawn.draws.front().in;
  const GradientSet needs = drawn.problem.needs;
  const RunOptions options = run_options(drawn.problem);
  if (!memory_alone()) {
    if (const std::string text = mismatch(kernel, drawn.problem, drawn.draws, options); !text.empty()) return text;
  }

  const Gradients clean = run(kernel, d, in, drawn.other);
  if (!clean.faults.empty()) return clean.faults.front();
  if (const std::string text = difference(run(kernel, d, in, options, needs), clean, needs); !text.empty()) {
    return "other bits with another layout, " + std::to_string(drawn.other.threads) +
           " threads or with all gradients asked for: " + text;
  }
  if (memory_alone()) return "";
  if (const std::string text = difference(run(kernel, d, drawn.poisoned, options), clean); !text.empty()) {
    return "what is hidden leaks: " + text;
  }
  const PokedBackward& poked = drawn.poked;
  if (!poked.done) return "";
  const std::string text = poke_mismatch(poked, clean, run(kernel, d, poked.inputs, options));
  return text.empty() ? "" : poked.where + ": " + text;
}

TEST(GradientRandom, ProblemsAreComputedAsDefined) {
  for_random_problems(2500, [](const Problem& drawn_problem, const std::vector<const Kernel*>& kernels, auto report) {
    const Problem p = without_cache(drawn_problem);
    const Drawn drawn(p);
    for (const Kernel* kernel : kernels) {
      report(*kernel, backward_command(kernel->name, p), [&] { return trouble(*kernel, drawn); });
    }
  });
}

}  // namespace
}  // namespace polyhead::testing
