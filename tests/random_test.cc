// Random problems on every kernel of this machine: sizes 0..130 and more, all options mixed, any layout.
//
//   POLYHEAD_RANDOM_PROBLEMS=1000000 random_test                        this many
//   POLYHEAD_RANDOM_SEED=42 POLYHEAD_RANDOM_PROBLEMS=1 random_test      that one
//   POLYHEAD_TEST_KERNEL=cpu_avx2 random_test                           that kernel alone
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "judge.h"
#include "poison.h"

namespace polyhead::testing {
namespace {

uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

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
  const uint64_t first = from_environment("POLYHEAD_RANDOM_SEED", 1);
  const uint64_t count = from_environment("POLYHEAD_RANDOM_PROBLEMS", 5000);
  const char* only = std::getenv("POLYHEAD_TEST_KERNEL");
  std::map<std::string, uint64_t> computed;
  int failures = 0;
  for (uint64_t seed = first; seed < first + count && failures < 20; ++seed) {
    const Problem p = random_problem(seed);
    const Result<Plan> checked = plan(p.desc, {.kernel = "reference"});
    ASSERT_TRUE(checked.ok()) << checked.status().message() << "\n" << problem_line("reference", p);
    const Inputs in = random_inputs(p);
    Expected want;
    bool has_want = false;
    for (const Kernel* kernel : kernel_list()) {
      if ((only && std::string(only) != kernel->name) || !kernel->why_not(p.desc).empty()) continue;
      if (!has_want) want = expected(p.desc, in);
      has_want = true;
      const std::string line = problem_line(kernel->name, p) + "\nPOLYHEAD_RANDOM_SEED=" + std::to_string(seed) +
                               " POLYHEAD_RANDOM_PROBLEMS=1 repeats it";
      set_running(line);
      ++computed[kernel->name];
      const std::string text = trouble(*kernel, p, in, want);
      EXPECT_EQ(text, "") << line;
      failures += !text.empty();
    }
  }
  std::printf("random problems, seeds %llu..%llu:", static_cast<unsigned long long>(first),
              static_cast<unsigned long long>(first + count - 1));
  for (const auto& [name, problems] : computed) {
    std::printf(" %s %llu", name.c_str(), static_cast<unsigned long long>(problems));
  }
  std::printf("\n");
  EXPECT_FALSE(computed.empty());
}

}  // namespace
}  // namespace polyhead::testing
