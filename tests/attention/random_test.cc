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

// Everything that one problem shows of a kernel; "" if all is well.
std::string trouble(const Kernel& kernel, const Problem& p, const std::vector<ForwardDraw>& draws) {
  const AttentionDesc& d = draws.front().desc;
  const Inputs& in = draws.front().in;
  Random random(p.seed ^ 0x5DEECE66D);
  const RunOptions options = run_options(p);
  if (!memory_alone()) {
    if (const std::string text = mismatch(kernel, p, draws, options); !text.empty()) return text;
  }

  const Outputs clean = run(kernel, d, in);
  RunOptions other = options;
  other.layout = Layout::kMixed;
  other.threads = static_cast<int>(random.integer(0, 4));
  other.layout_seed = p.seed + 1;
  if (const std::string text = difference(run(kernel, d, in, other), clean); !text.empty()) {
    return "other bits with another layout or " + std::to_string(other.threads) + " threads: " + text;
  }
  if (memory_alone()) return "";
  const Inputs poisoned = poison_hidden(d, in, p.seed);
  if (const std::string text = difference(run(kernel, d, poisoned, options), clean); !text.empty()) {
    return "what is hidden leaks: " + text;
  }
  const Poked poked = poke_visible(d, in, static_cast<Poke>(random.integer(0, 3)), p.seed);
  if (!poked.done || p.desc.dropout_p >= 1) return "";
  const std::string text = poke_mismatch(d, poked.inputs, clean, run(kernel, d, poked.inputs, options));
  return text.empty() ? "" : poked.where + ": " + text;
}

TEST(Random, ProblemsAreComputedAsDefined) {
  for_random_problems(5000, [](const Problem& p, const std::vector<const Kernel*>& kernels, auto report) {
    std::vector<ForwardDraw> draws;
    if (memory_alone()) draws.push_back({problem_desc(p), random_inputs(p), {}});
    if (!memory_alone()) draws = forward_draws(p);
    for (const Kernel* kernel : kernels) {
      report(*kernel, forward_command(kernel->name, p), [&] { return trouble(*kernel, p, draws); });
    }
  });
}

}  // namespace
}  // namespace polyhead::testing
