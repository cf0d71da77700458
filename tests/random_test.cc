// Random problems on every kernel of this machine: sizes 0..130 and more, all options mixed, any layout.
//
//   POLYHEAD_RANDOM_PROBLEMS=1000000 random_test                        this many
//   POLYHEAD_RANDOM_SEED=42 POLYHEAD_RANDOM_PROBLEMS=1 random_test      that one
//   POLYHEAD_TEST_KERNEL=cpu_avx2 random_test                           that kernel alone
#include <gtest/gtest.h>

#include "judge.h"
#include "poison.h"
#include "random_problems.h"

namespace polyhead::testing {
namespace {

// Everything that one problem shows of a kernel; "" if all is well.
std::string trouble(const Kernel& kernel, const Problem& p, const Inputs& in, const Expected& want) {
  Random random(p.seed ^ 0x5DEECE66D);
  RunOptions options;
  options.layout = Layout::kMixed;
  options.layout_seed = p.seed;
  options.guard = random.chance(0.5) ? Guard::kEnd : Guard::kStart;
  options.through_plan = true;
  if (const std::string text = mismatch(kernel, p, in, want, options); !text.empty()) return text;

  const Outputs clean = run(kernel, p.desc, in);
  RunOptions other = options;
  other.threads = static_cast<int>(random.integer(0, 4));
  other.layout_seed = p.seed + 1;
  if (const std::string text = difference(run(kernel, p.desc, in, other), clean); !text.empty()) {
    return "other bits with another layout or " + std::to_string(other.threads) + " threads: " + text;
  }
  const Inputs poisoned = poison_hidden(p.desc, in, p.seed);
  if (const std::string text = difference(run(kernel, p.desc, poisoned, options), clean); !text.empty()) {
    return "what is hidden leaks: " + text;
  }
  const Poked poked = poke_visible(p.desc, in, static_cast<Poke>(random.integer(0, 3)), p.seed);
  if (!poked.done || p.desc.dropout_p >= 1) return "";
  const std::string text = poke_mismatch(p.desc, poked.inputs, clean, run(kernel, p.desc, poked.inputs, options));
  return text.empty() ? "" : poked.where + ": " + text;
}

TEST(Random, ProblemsAreComputedAsDefined) {
  for_random_problems(5000, [](const Problem& p, const std::vector<const Kernel*>& kernels, auto report) {
    const Inputs in = random_inputs(p);
    const Expected want = expected(p.desc, in);
    for (const Kernel* kernel : kernels) {
      report(*kernel, problem_line(kernel->name, p), [&] { return trouble(*kernel, p, in, want); });
    }
  });
}

}  // namespace
}  // namespace polyhead::testing
