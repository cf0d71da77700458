// The judge behind `polyhead verify`: it passes the yardstick itself, and fails what a broken kernel would write.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tools/elements.h"
#include "tools/selection.h"
#include "tools/verify.h"

namespace polyhead::tools {
namespace {

Truth truth_of(const std::string& line) {
  const auto problem = select_problem(split_words(line));
  EXPECT_TRUE(problem.ok()) << problem.status().message();
  auto truth = compute_truth(*problem);
  EXPECT_TRUE(truth.ok()) << truth.status().message();
  return std::move(*truth);
}

const Verdict& verdict_of(const std::vector<Verdict>& verdicts, const std::string& output) {
  const auto found =
      std::find_if(verdicts.begin(), verdicts.end(), [&](const Verdict& v) { return v.output == output; });
  EXPECT_NE(found, verdicts.end()) << output;
  return *found;
}

constexpr char kLine[] =
    "2x4/2x12/20x16/8 --causal --align top_left --mask b,1,1,k:padding --weights head --column-sums";

TEST(ToolsVerify, TheYardstickPassesItsOwnBound) {
  for (const char* dtype : {"f32", "bf16", "f16", "f64"}) {
    const Truth truth = truth_of(std::string(kLine) + " --dtype " + dtype);
    const std::vector<Verdict> verdicts = judge(truth, truth.yardstick);
    EXPECT_EQ(verdicts.size(), 4u);
    for (const Verdict& verdict : verdicts) {
      EXPECT_TRUE(verdict.passed) << dtype << " " << verdict.fault;
      EXPECT_LE(verdict.largest_error, verdict.allowed) << dtype << " " << verdict.output;
      EXPECT_GT(verdict.allowed, 0) << dtype << " " << verdict.output;
    }
  }
}

// One element of one output is changed by a few times what is allowed.
TEST(ToolsVerify, OneWrongElementFails) {
  for (const char* name : {"out", "logsumexp", "weights", "column_sums"}) {
    const Truth truth = truth_of(kLine), again = truth_of(kLine);
    const Outputs& got = again.yardstick;
    const Tensor& tensor = std::string(name) == "out"         ? got.out
                           : std::string(name) == "logsumexp" ? got.logsumexp
                           : std::string(name) == "weights"   ? got.weights
                                                              : got.column_sums;
    auto* element = static_cast<float*>(tensor.data);  // [0, 0, 0..]: key 0 is seen by query 0, or nothing is
    element += tensor.num_elements() - 1;
    const float right = *element;
    const double allowed = verdict_of(judge(truth, got), name).allowed;
    for (const float wrong : {right + 20 * static_cast<float>(allowed), NAN, -INFINITY, INFINITY}) {
      if (wrong == right) continue;
      *element = wrong;
      const std::vector<Verdict> verdicts = judge(truth, got);
      const Verdict& verdict = verdict_of(verdicts, name);
      EXPECT_FALSE(verdict.passed) << name << " " << wrong;
      EXPECT_EQ(verdict.fault.substr(0, std::string(name).size() + 1), std::string(name) + "[");
      EXPECT_FALSE(verdict.largest_error <= verdict.allowed) << name << " " << wrong;
      for (const Verdict& other : verdicts) EXPECT_EQ(other.passed, other.output != name);
    }
    *element = right;
    EXPECT_TRUE(verdict_of(judge(truth, got), name).passed);
  }
}

TEST(ToolsVerify, RowsThatSeeNothingMustBePlusZero) {
  const char* line = "1x2x6/3x4 --causal --align bottom_right";  // queries 0 to 2 see no key
  const Truth truth = truth_of(line), again = truth_of(line);
  const Outputs& got = again.yardstick;
  auto* out = static_cast<float*>(got.out.data);
  auto* logsumexp = static_cast<float*>(got.logsumexp.data);
  EXPECT_TRUE(judge(truth, got)[0].passed);
  for (const float wrong : {-0.0f, 1e-30f, NAN}) {
    out[2 * 2 * 4 + 1] = wrong;
    EXPECT_FALSE(judge(truth, got)[0].passed) << wrong;
  }
  out[2 * 2 * 4 + 1] = 0;
  EXPECT_EQ(logsumexp[2], -INFINITY);
  logsumexp[2] = -1e30f;
  EXPECT_FALSE(judge(truth, got)[1].passed);
}

TEST(ToolsVerify, OutputsThatWereNotWrittenFail) {
  const Truth truth = truth_of("1x2x6x4");
  const auto untouched = new_outputs(truth.inputs.desc, true, Layout::kBshd, 1);
  ASSERT_TRUE(untouched.ok());
  for (const Verdict& verdict : judge(truth, *untouched)) EXPECT_FALSE(verdict.passed) << verdict.output;
}

}  // namespace
}  // namespace polyhead::tools
