// Random layers, all options mixed, on every kernel that takes them.
//
//   POLYHEAD_RANDOM_LAYERS=100000 layer_random_test                        this many
//   POLYHEAD_RANDOM_SEED=42 POLYHEAD_RANDOM_LAYERS=1 layer_random_test     that one
#include <gtest/gtest.h>

#include <cstdio>

#include "layer_on_cache.h"
#include "random_problems.h"

namespace polyhead::testing {
namespace {

// Everything that one problem shows of a kernel, in training and without dropout; "" if all is well.
std::string trouble(const LayerProblem& problem, const char* kernel, LayerDraws& draws, LayerDraws& inferred) {
  const LayerInputs in = random_inputs(problem);
  Random random(problem.seed ^ 0x5DEECE66D);
  LayerRun options{.kernel = kernel, .layout_seed = problem.seed};
  options.guard = random.chance(0.5) ? Guard::kEnd : Guard::kStart;
  if (const std::string text = draws.judge(options); !text.empty()) return text;
  LayerRun other = options;
  other.threads = static_cast<int>(random.integer(0, 4));
  other.layout_seed = problem.seed + 1;
  if (const std::string text = difference(run(problem, in, options), run(problem, in, other)); !text.empty()) {
    return "other bits with another layout or " + std::to_string(other.threads) + " threads: " + text;
  }
  const std::string text = inferred.judge(
      [&](const LayerProblem& drawn, const LayerInputs& numbers) { return run_steps(drawn, numbers, options, false); });
  if (!text.empty()) return "in single steps: " + text;
  const LayerDesc& d = problem.desc;
  if (d.beam != 1 || d.dtype == DType::kFloat64) return "";
  const Cut cut{
      kernel, options.threads, {random.integer(1, 20), random.integer(1, 14)}, random.integer(1, 9), may_join(problem)};
  const std::string cached = inferred.judge(
      [&](const LayerProblem& drawn, const LayerInputs& numbers) { return run_on_cache(drawn, numbers, cut); });
  return cached.empty() ? "" : "on a cache: " + cached;
}

TEST(RandomLayers, MatchTheFormulas) {
  const uint64_t first = from_environment("POLYHEAD_RANDOM_SEED", 1);
  const uint64_t count = from_environment("POLYHEAD_RANDOM_LAYERS", 250);
  int failures = 0;
  uint64_t num_run = 0;
  for (uint64_t seed = first; seed < first + count && failures < 20; ++seed) {
    const LayerProblem problem = random_layer_problem(seed);
    const Result<Layer> made = layer(problem.desc);
    ASSERT_TRUE(made.ok()) << seed << ": " << made.status().message();
    LayerDraws draws(problem), inferred(inference(problem), false);
    for (const Kernel* kernel : kernels_to_test()) {
      if (!why_not(problem, kernel->name).empty()) continue;
      set_running(problem.name + " on " + kernel->name);
      const std::string text = trouble(problem, kernel->name, draws, inferred);
      failures += !text.empty();
      EXPECT_EQ(text, "") << "POLYHEAD_RANDOM_SEED=" << seed << " POLYHEAD_TEST_KERNEL=" << kernel->name << " "
                          << dtype_name(problem.desc.dtype);
      ++num_run;
    }
  }
  std::printf("random layers: %llu runs\n", static_cast<unsigned long long>(num_run));
  EXPECT_GT(num_run, 0u);
}

}  // namespace
}  // namespace polyhead::testing
