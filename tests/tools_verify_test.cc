// The judge behind `polyhead verify`: it passes the yardstick itself, and fails what a broken kernel would write.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tools/elements.h"
#include "tools/random.h"
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

std::vector<Verdict> judge(const Truth& truth, const Outputs& got) {
  Judge judge;
  judge.add(truth, got);
  return judge.verdicts();
}

std::vector<Verdict> judge(const GradientTruth& truth, const Gradients& got) {
  Judge judge;
  judge.add(truth, got);
  return judge.verdicts();
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
      EXPECT_LE(verdict.error, verdict.allowed) << dtype << " " << verdict.output;
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
      EXPECT_FALSE(verdict.error <= verdict.allowed) << name << " " << wrong;
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

GradientTruth gradient_truth_of(const std::string& line) {
  const auto problem = select_problem(split_words(line));
  EXPECT_TRUE(problem.ok()) << problem.status().message();
  auto truth = compute_gradient_truth(*problem);
  EXPECT_TRUE(truth.ok()) << truth.status().message();
  return std::move(*truth);
}

constexpr char kGradientLine[] =
    "2x4/2x12/20x16/8 --causal --align top_left --bias b,1,q,k --alibi=batch --softcap 5 --logsumexp";

TEST(ToolsVerify, TheYardsticksGradientsPassTheirBound) {
  for (const char* more : {"", " --dtype bf16", " --dtype f16", " --dtype f64", " --accumulate", " --dropout 0.2"}) {
    const GradientTruth truth = gradient_truth_of(std::string(kGradientLine) + more);
    const std::vector<Verdict> verdicts = judge(truth, truth.yardstick);
    EXPECT_EQ(verdicts.size(), kNumGradients) << more;
    for (const Verdict& verdict : verdicts) {
      EXPECT_TRUE(verdict.passed) << more << " " << verdict.fault;
      EXPECT_LE(verdict.error, verdict.allowed) << more << " " << verdict.output;
      EXPECT_GT(verdict.allowed, 0) << more << " " << verdict.output;
    }
  }
}

TEST(ToolsVerify, OneWrongGradientFails) {
  for (size_t n = 0; n < kNumGradients; ++n) {
    const GradientTruth truth = gradient_truth_of(kGradientLine), again = gradient_truth_of(kGradientLine);
    const Gradients& got = again.yardstick;
    auto* element = static_cast<float*>(got.of[n].data);  // query 0 sees key 0
    const float right = *element;
    const double allowed = judge(truth, got)[n].allowed;
    for (const float wrong : {right + 20 * static_cast<float>(allowed), NAN, INFINITY}) {
      *element = wrong;
      const std::vector<Verdict> verdicts = judge(truth, got);
      EXPECT_FALSE(verdicts[n].error <= verdicts[n].allowed) << kGradients[n].name << " " << wrong;
      EXPECT_EQ(verdicts[n].fault.find(std::string(kGradients[n].name) + "[0"), 0u) << verdicts[n].fault;
      for (size_t m = 0; m < kNumGradients; ++m) EXPECT_EQ(verdicts[m].passed, m != n) << kGradients[m].name;
    }
  }
}

// Queries 0 to 2 see no key, and with --accumulate keep what they hold.
TEST(ToolsVerify, GradientsOfRowsThatSeeNothingAreExact) {
  for (const char* line :
       {"1x2x6/3x4 --causal --align bottom_right", "1x2x6/3x4 --causal --align bottom_right --accumulate"}) {
    const GradientTruth truth = gradient_truth_of(line), again = gradient_truth_of(line);
    const Gradients& got = again.yardstick;
    auto* hidden = static_cast<float*>(got.of[0].data) + 2 * 2 * 4 + 1;
    EXPECT_TRUE(judge(truth, got)[0].passed);
    EXPECT_EQ(*hidden == 0, std::string(line).find("--accumulate") == std::string::npos);
    for (const float wrong : {*hidden + 1e-6f, NAN}) {
      *hidden = wrong;
      EXPECT_FALSE(judge(truth, got)[0].passed) << line << " " << wrong;
    }
  }
}

TEST(ToolsVerify, GradientsThatWereNotWrittenFail) {
  const std::string line = "1x2x6x4 --bias 1,h,q,k";
  const GradientTruth truth = gradient_truth_of(line);
  const auto untouched = new_gradients(*select_problem(split_words(line)), truth.inputs.desc, truth.needs);
  ASSERT_TRUE(untouched.ok());
  const std::vector<Verdict> verdicts = judge(truth, *untouched);
  EXPECT_EQ(verdicts.size(), 4u);
  for (const Verdict& verdict : verdicts) EXPECT_FALSE(verdict.passed) << verdict.output;
}

TEST(ToolsVerify, OnlyWhatIsNeededIsJudged) {
  const GradientTruth truth = gradient_truth_of("1x2x6x4 --alibi --needs value,alibi_slopes");
  EXPECT_FALSE(truth.exact.of[0].given());
  const std::vector<Verdict> verdicts = judge(truth, truth.yardstick);
  ASSERT_EQ(verdicts.size(), 2u);
  EXPECT_EQ(verdicts[0].output, "grad_value");
  EXPECT_EQ(verdicts[1].output, "grad_alibi_slopes");
}

// One query and one key, so P = 1: the sums have few terms, which are added up here by hand.
TEST(ToolsVerify, MagnitudesAreSumsOfAbsoluteTerms) {
  for (const char* more : {"", " --scale -0.5", " --accumulate"}) {
    const GradientTruth truth = gradient_truth_of(
        std::string("1x1x1x3/2 --dtype f64 --logsumexp --bias 1,1,1,1 --bias-dtype f64 --seed 5") + more);
    const auto value = [](const Tensor& t, size_t n) { return std::fabs(element_values(t)[n]); };
    const ForwardArgs& in = truth.inputs.args;
    double a = value(truth.incoming.grad_logsumexp, 0);  // sum |dO V| + sum |dO O| + |dL|
    for (size_t d = 0; d < 2; ++d) {
      a += value(truth.incoming.grad_out, d) * (value(in.value, d) + value(truth.saved.out, d));
    }
    const double scale = std::fabs(truth.inputs.desc.scale.value_or(1 / std::sqrt(3.0)));
    const auto problem = select_problem(
        split_words(std::string("1x1x1x3/2 --dtype f64 --bias 1,1,1,1 --bias-dtype f64 --seed 5") + more));
    const auto before = new_gradients(*problem, truth.inputs.desc, truth.needs);
    const auto held = [&](size_t n, size_t d) { return problem->accumulate ? value(before->of[n], d) : 0; };
    for (size_t d = 0; d < 3; ++d) {
      EXPECT_NEAR(truth.magnitude[0][d], scale * a * value(in.key, d) + held(0, d), 1e-14);
      EXPECT_NEAR(truth.magnitude[1][d], scale * a * value(in.query, d) + held(1, d), 1e-14);
    }
    for (size_t d = 0; d < 2; ++d) {
      EXPECT_NEAR(truth.magnitude[2][d], value(truth.incoming.grad_out, d) + held(2, d), 1e-14);
    }
    EXPECT_NEAR(truth.magnitude[3][0], a + held(3, 0), 1e-14);
  }
}

// 8192 numbers around 1000, whose yardstick is off by up to 1e-4 both ways.
class ToolsErrors : public ::testing::Test {
 protected:
  ToolsErrors() {
    Random random(1, 1);
    for (size_t n = 0; n < 8192; ++n) {
      exact_.push_back(1000 + random.uniform());
      yardstick_.push_back(exact_[n] + 1e-4 * (2 * random.uniform() - 1));
    }
  }
  // `error(n)` is added to the exact number n.
  template <class Error>
  std::vector<std::string> complaints(const Bound& bound, Error error) const {
    std::vector<double> got = exact_;
    for (size_t n = 0; n < got.size(); ++n) got[n] += error(n);
    const int64_t dims[] = {64, 128};
    Errors errors("x", bound);
    errors.add({DType::kFloat32, dims, got, exact_, yardstick_, std::vector<double>(got.size(), 1e-3)});
    return errors.complaints();
  }
  std::vector<double> exact_, yardstick_;
};

TEST_F(ToolsErrors, TheLargestErrorIsBounded) {
  const auto one = [](double error) { return [error](size_t n) { return n == 200 ? error : 0; }; };
  EXPECT_TRUE(complaints({2, 1.1, 1}, one(1.99e-4)).empty());
  EXPECT_TRUE(complaints({3, 1.1, 1}, one(-2.99e-4)).empty());
  const std::vector<std::string> found = complaints({2, 1.1, 1}, one(2.1e-4));
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].find("x[1, 72] is "), 0u) << found[0];
}

TEST_F(ToolsErrors, RmseAndDriftAreBounded) {
  const auto alternating = [](double error) { return [error](size_t n) { return n % 2 == 0 ? error : -error; }; };
  const auto constant = [](double error) { return [error](size_t) { return error; }; };
  const double rmse = 1e-4 / std::sqrt(3.0);  // of the yardstick
  EXPECT_TRUE(complaints({2, 1.1, 1}, alternating(1.1 * rmse)).empty());
  EXPECT_EQ(complaints({2, 1.1, 1}, alternating(1.2 * rmse)).size(), 1u);
  EXPECT_TRUE(complaints({2, 1.5, 1}, alternating(1.5 * rmse)).empty());
  const std::vector<std::string> drift = complaints({2, 1.1, 1}, constant(0.9 * rmse));
  ASSERT_EQ(drift.size(), 1u);
  EXPECT_NE(drift[0].find("mean signed error"), std::string::npos) << drift[0];
}

}  // namespace
}  // namespace polyhead::tools
