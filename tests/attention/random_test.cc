// Random problems on every kernel of this machine: sizes 0..130 and more, all options mixed, any layout.
//
//   POLYHEAD_RANDOM_PROBLEMS=1000000 random_test                        this many
//   POLYHEAD_RANDOM_SEED=42 POLYHEAD_RANDOM_PROBLEMS=1 random_test      that one
//   POLYHEAD_TEST_KERNEL=cpu_avx2 random_test                           that kernel alone
#include <gtest/gtest.h>

#include "every_kernel.h"
#include "poison.h"
#include "random_problems.h"
#include "testing/judge.h"
#include "testing/problem_words.h"

namespace polyhead::testing {
namespace {

// What a problem has in common for all kernels.
struct Drawn {
  const Problem& problem;
  std::vector<ForwardDraw> draws;
  RunOptions other;  // than the problem's own
  Inputs poisoned;
  Poked poked;

  explicit Drawn(const Problem& p) : problem(p), other(run_options(p)) {
    Random random(p.seed ^ 0x5DEECE66D);
    other.layout = Layout::kMixed;
    other.threads = static_cast<int>(random.integer(0, 4));
    other.layout_seed = p.seed + 1;
    if (memory_alone()) {
      draws.push_back({problem_desc(p), random_inputs(p), {}});
      return;
    }
    draws = forward_draws(p);
    const ForwardDraw& first = draws.front();
    poisoned = poison_hidden(first.desc, first.in, p.seed);
    const auto poke = static_cast<Poke>(random.integer(0, 3));
    if (p.desc.dropout_p < 1) poked = poke_visible(first.desc, first.in, poke, p.seed);
  }
};

// Everything that one problem shows of a kernel; "" if all is well.
std::string trouble(const Kernel& kernel, const Drawn& drawn) {
  const AttentionDesc& d = drawn.draws.front().desc;
  const Inputs& in = drawn.draws.front().in;
  const RunOptions options = run_options(drawn.problem);
  if (!memory_alone()) {
    if (const std::string text = mismatch(kernel, drawn.problem, drawn.draws, options); !text.empty()) return text;
  }

  const Outputs clean = run(kernel, d, in);
  if (const std::string text = difference(run(kernel, d, in, drawn.other), clean); !text.empty()) {
    return "other bits with another layout or " + std::to_string(drawn.other.threads) + " threads: " + text;
  }
  if (memory_alone()) return "";
  if (const std::string text = difference(run(kernel, d, drawn.poisoned, options), clean); !text.empty()) {
    return "what is hidden leaks: " + text;
  }
  const Poked& poked = drawn.poked;
  if (!poked.done) return "";
  const std::string text = poke_mismatch(d, poked.inputs, clean, run(kernel, d, poked.inputs, options));
  return text.empty() ? "" : poked.where + ": " + text;
}

TEST(Random, ProblemsAreComputedAsDefined) {
  for_random_problems(5000, [](const Problem& p, const std::vector<const Kernel*>& kernels, auto report) {
    const Drawn drawn(p);
    for (const Kernel* kernel : kernels) {
      report(*kernel, forward_command(kernel->name, p), [&] { return trouble(*kernel, drawn); });
    }
  });
}

}  // namespace
}  // namespace polyhead::testing
