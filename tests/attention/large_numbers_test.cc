// Numbers near the ends of float32, and those behind, where every query sees them: what is right for them, and that they and what
// lies beside them change no other row's bits. Hidden ones: attention_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "cases.h"
#include "every_kernel.h"
#include "testing/call.h"

namespace polyhead::testing {
namespace {

constexpr int64_t kQueries = 40, kKeys = 70, kDim = 33;

Problem causal_problem() {
  Problem problem = problem_of("large_numbers", DType::kFloat32, 1, 1, kQueries, kKeys, kDim);
  problem.desc.causal = true;
  problem.desc.align = Align::kBottomRight;
  return problem;
}

// NaN in the last value is seen by the last query alone.
TEST(LargeNumbers, LargeValuesHaveTheSameBitsBesideOnesThatAreNot) {
  const Problem problem = causal_problem();
  Inputs in = random_inputs(problem);
  for (int64_t d = 0; d < kDim; ++d) in.value.set(5 * kDim + d, std::ldexp(d % 2 == 0 ? 1.25 : -1.0, 70));
  Inputs poked = in;
  poked.value.set((kKeys - 1) * kDim + 7, NAN);
  for_every_kernel(problem_desc(problem), [&](const Kernel& kernel) {
    const Outputs want = run(kernel, problem_desc(problem), in), got = run(kernel, problem_desc(problem), poked);
    for (int64_t at = 0; at < (kQueries - 1) * kDim; ++at) {
      ASSERT_EQ(got.out.at(at), want.out.at(at)) << kernel.name << " query " << at / kDim;
    }
    ASSERT_TRUE(std::isnan(got.out.at((kQueries - 1) * kDim + 7))) << kernel.name;
  });
}

// A key's or query's number whose score is right in float32, or infinite.
TEST(LargeNumbers, KeysAndQueriesAreMultipliedAsTheyAre) {
  const Problem problem = causal_problem();
  const AttentionDesc desc = problem_desc(problem);
  for (const double number : {std::ldexp(1.0, 60), std::ldexp(1.0, 100), 3.4e38, HUGE_VAL, -HUGE_VAL}) {
    Inputs in = random_inputs(problem);
    in.key.set(6 * kDim + 3, number);
    in.query.set(11 * kDim + 4, -number);
    const double least = std::ldexp(1.0, -100);  // smaller ones lose bits in planes
    const auto against = [&](double score) {
      return std::isinf(number) ? 1.0 : std::copysign(std::max(score / std::abs(number), least), number);
    };
    for (int64_t i = 0; i < kQueries; ++i) in.query.set(i * kDim + 3, against(static_cast<double>(i + 1)));
    for (int64_t j = 0; j < kKeys; ++j) in.key.set(j * kDim + 4, against(2));
    const Outputs want = run(*kernel_list().back(), desc, in);
    for_every_kernel(desc, [&](const Kernel& kernel) {
      const Outputs got = run(kernel, desc, in);
      for (int64_t at = 0; at < got.out.size(); ++at) {
        ASSERT_EQ(std::isnan(got.out.at(at)), std::isnan(want.out.at(at))) << kernel.name << " query " << at / kDim;
        if (std::isnan(want.out.at(at))) continue;
        ASSERT_NEAR(got.out.at(at), want.out.at(at), 1e-4) << kernel.name << " query " << at / kDim << ", " << number;
      }
    });
  }
}

// Products near the least numbers of float32, which `scale` makes scores of a usual size: right, or refused.
TEST(LargeNumbers, AScaleMayUndoSmallKeys) {
  Problem problem = causal_problem();
  for (const int power : {59, 120}) {
    problem.desc.scale = std::ldexp(1.0, power);
    Inputs in = random_inputs(problem);
    for (int64_t at = 0; at < in.key.size(); ++at) in.key.set(at, in.key.at(at) * std::ldexp(0.125, -power));
    const AttentionDesc desc = problem_desc(problem);
    const Outputs want = run(*kernel_list().back(), desc, in);
    for_every_kernel(desc, [&](const Kernel& kernel) {
      const Outputs got = run(kernel, desc, in);
      for (int64_t at = 0; at < got.out.size(); ++at) {
        ASSERT_NEAR(got.out.at(at), want.out.at(at), 1e-5) << kernel.name << " query " << at / kDim << ", 2^" << power;
      }
    });
  }
}

// Every bit of a number may be set where it is NaN: memory that nobody wrote to often looks so.
TEST(LargeNumbers, NanOfAnyBitsReachesItsRow) {
  constexpr int64_t kRow = 5, kAllKeys = 96;
  for (const int64_t dim : {32, 64, 128}) {
    Problem problem = problem_of("large_numbers", DType::kBFloat16, 1, 1, kQueries, kAllKeys, dim);
    problem.desc.attn_bias = {true, DType::kFloat32, {1, 1, kQueries, kAllKeys}};
    problem.edges = false;
    const AttentionDesc desc = problem_desc(problem);
    Inputs in = random_inputs(problem);
    for (int64_t i = 0; i < kQueries; ++i) in.attn_bias.set(i * kAllKeys + 90, 60);  // raises m
    for_every_kernel(desc, [&](const Kernel& kernel) {
      const Outputs want = run(kernel, desc, in);
      for (const uint32_t bits : {0x7fc00000u, 0x7fffffffu, 0xffffffffu, 0x7f800001u}) {
        for (const int64_t key : {1, 37, 80}) {
          Inputs poked = in;
          std::memcpy(poked.attn_bias.bytes.data() + (kRow * kAllKeys + key) * sizeof bits, &bits, sizeof bits);
          const Outputs got = run(kernel, desc, poked);
          for (int64_t at = 0; at < got.out.size(); ++at) {
            ASSERT_TRUE(at / dim == kRow ? std::isnan(got.out.at(at)) : got.out.at(at) == want.out.at(at))
                << kernel.name << ", bits " << bits << " at key " << key << ", element " << at;
          }
          ASSERT_TRUE(std::isnan(got.logsumexp.at(kRow))) << kernel.name << ", bits " << bits << " at key " << key;
        }
      }
    });
  }
}

}  // namespace
}  // namespace polyhead::testing
