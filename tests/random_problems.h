// The loop over random problems, as the environment asks for it:
//   POLYHEAD_RANDOM_SEED=first  POLYHEAD_RANDOM_PROBLEMS=count  POLYHEAD_TEST_KERNEL=name
//   POLYHEAD_RANDOM_CACHED=1: of these, what a cache holds alone: keys and values in pages, or in a stored format
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "kernels_to_test.h"
#include "testing/guard.h"
#include "testing/operands.h"
#include "testing/problem_words.h"

namespace polyhead::testing {

inline uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

inline bool is_cached(const AttentionDesc& d) {
  return d.page_size > 0 || d.key_dtype.has_value() || d.value_dtype.has_value();
}

// Calls test(problem, the kernels that take it, report) for each random problem that some kernel takes; the test calls
// report(kernel, line, trouble) for each kernel, where trouble() says what is wrong, "" if nothing. Stops after 20
// failures.
template <class Test>
void for_random_problems(uint64_t default_count, Test test) {
  const uint64_t first = from_environment("POLYHEAD_RANDOM_SEED", 1);
  const uint64_t count = from_environment("POLYHEAD_RANDOM_PROBLEMS", default_count);
  std::map<std::string, uint64_t> computed;
  int failures = 0;
  for (uint64_t seed = first; seed < first + count && failures < 20; ++seed) {
    const Problem p = random_problem(seed);
    if (from_environment("POLYHEAD_RANDOM_CACHED", 0) != 0 && !is_cached(p.desc)) continue;
    const Result<Plan> checked = plan(problem_desc(p), {.kernel = "reference"});
    ASSERT_TRUE(checked.ok()) << checked.status().message() << "\n" << forward_command("reference", p);
    std::vector<const Kernel*> kernels;
    for (const Kernel* kernel : kernels_to_test()) {
      if (kernel->why_not(problem_desc(p)).empty()) kernels.push_back(kernel);
    }
    if (kernels.empty()) continue;
    test(p, kernels, [&](const Kernel& kernel, std::string line, auto trouble) {
      line += "\nPOLYHEAD_RANDOM_SEED=" + std::to_string(seed) + " POLYHEAD_RANDOM_PROBLEMS=1 repeats it";
      set_running(line);
      ++computed[kernel.name];
      const std::string text = trouble();
      EXPECT_EQ(text, "") << line;
      failures += !text.empty();
    });
  }
  std::printf("random problems, seeds %llu..%llu:", static_cast<unsigned long long>(first),
              static_cast<unsigned long long>(first + count - 1));
  for (const auto& [name, problems] : computed) {
    std::printf(" %s %llu", name.c_str(), static_cast<unsigned long long>(problems));
  }
  std::printf("\n");
  EXPECT_FALSE(computed.empty());
}

}  // namespace polyhead::testing
