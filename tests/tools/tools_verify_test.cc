// The judge behind `polyhead verify` and the tests: it passes the yardstick itself, and fails what a broken kernel would
// write.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "testing/judge.h"
#include "testing/random.h"
#include "tools/selection.h"

namespace polyhead::tools {
namespace {

Problem problem_in(const std::string& line) {
  const auto problem = select_problem(split_words(line));
  EXPECT_TRUE(problem.ok()) << problem.status().message();
  return *problem;
}

// What a line's problem should give in its first draw, and what is judged in its place.
struct Forward {
  Problem problem;
  Expected want;
  Outputs got;

  explicit Forward(const std::string& line)
      : problem(problem_in(line)), want(expected(problem_desc(problem), random_inputs(problem))), got(want.naive) {}
  std::vector<Verdict> verdicts() const {
    Judge judge(problem);
    judge.add(problem_desc(problem), got, want);
    return judge.verdicts();
  }
};

struct Backward {
  Problem problem;
  BackwardInputs in;
  ExpectedGradients want;
  Gradients got;

  explicit Backward(const std::string& line)
      : problem(problem_in(line)),
        in(random_backward_inputs(problem)),
        want(expected(problem_desc(problem), in)),
        got(want.naive) {}
  std::vector<Verdict> verdicts() const {
    Judge judge(problem);
    judge.add(problem_desc(problem), got, want, in);
    return judge.verdicts();
  }
};

const Verdict& verdict_of(const std::vector<Verdict>& verdicts, const std::string& output) {
  const auto found =
      std::find_if(verdicts.begin(), verdicts.end(), [&](const Verdict& v) { return v.output == output; });
  EXPECT_NE(found, verdicts.end()) << output;
  return *found;
}

void unwrite(Array& array) { std::fill(array.bytes.begin(), array.bytes.end(), uint8_t{0xff}); }

constexpr char kLine[] =
    "2x4/2x12/20x16/8 --causal --align top_left --mask b,1,1,k:padding --weights head --column-sums";

TEST(ToolsVerify, TheYardstickPassesItsOwnBound) {
  for (const char* dtype : {"f32", "bf16", "f16", "f64"}) {
    const std::vector<Verdict> verdicts = Forward(std::string(kLine) + " --dtype " + dtype).verdicts();
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
  const std::pair<const char*, Array Outputs::*> outputs[] = {{"out", &Outputs::out},
                                                              {"logsumexp", &Outputs::logsumexp},
                                                              {"attn_weights", &Outputs::attn_weights},
                                                              {"column_sums", &Outputs::column_sums}};
  for (const auto& [name, output] : outputs) {
    Forward run(kLine);
    Array& array = run.got.*output;
    const int64_t last = array.size() - 1;
    const double right = array.at(last), allowed = verdict_of(run.verdicts(), name).allowed;
    for (const double wrong : {right + 20 * allowed, double{NAN}, -HUGE_VAL, HUGE_VAL}) {
      if (wrong == right) continue;
      array.set(last, wrong);
      const std::vector<Verdict> verdicts = run.verdicts();
      const Verdict& verdict = verdict_of(verdicts, name);
      EXPECT_FALSE(verdict.passed) << name << " " << wrong;
      EXPECT_EQ(verdict.fault.substr(0, std::string(name).size() + 1), std::string(name) + "[");
      EXPECT_FALSE(verdict.error <= verdict.allowed) << name << " " << wrong;
      for (const Verdict& other : verdicts) EXPECT_EQ(other.passed, other.output != name);
    }
    array.set(last, right);
    EXPECT_TRUE(verdict_of(run.verdicts(), name).passed);
  }
}

TEST(ToolsVerify, RowsThatSeeNothingMustBePlusZero) {
  Forward run("1x2x6/3x4 --causal --align bottom_right");  // queries 0 to 2 see no key
  EXPECT_TRUE(verdict_of(run.verdicts(), "out").passed);
  for (const double wrong : {-0.0, 1e-30, double{NAN}}) {
    run.got.out.set(2 * 2 * 4 + 1, wrong);
    const std::vector<Verdict> verdicts = run.verdicts();
    EXPECT_FALSE(std::all_of(verdicts.begin(), verdicts.end(), [](const Verdict& v) { return v.passed; })) << wrong;
  }
  run.got.out.set(2 * 2 * 4 + 1, 0);
  EXPECT_EQ(run.got.logsumexp.at(2), -HUGE_VAL);
  run.got.logsumexp.set(2, -1e30);
  EXPECT_FALSE(verdict_of(run.verdicts(), "logsumexp").passed);
}

TEST(ToolsVerify, OutputsThatWereNotWrittenFail) {
  Forward run("1x2x6x4");
  for (Array* array : {&run.got.out, &run.got.logsumexp}) unwrite(*array);
  for (const Verdict& verdict : run.verdicts()) EXPECT_FALSE(verdict.passed) << verdict.output;
}

constexpr char kGradientLine[] =
    "2x4/2x12/20x16/8 --causal --align top_left --bias b,1,q,k --alibi=batch --sinks --softcap 5 "
    "--logsumexp";

TEST(ToolsVerify, TheYardsticksGradientsPassTheirBound) {
  for (const char* more : {"", " --dtype bf16", " --dtype f16", " --dtype f64", " --accumulate", " --dropout 0.2"}) {
    const std::vector<Verdict> verdicts = Backward(std::string(kGradientLine) + more).verdicts();
    EXPECT_EQ(verdicts.size(), static_cast<size_t>(kNumGradients)) << more;
    for (const Verdict& verdict : verdicts) {
      EXPECT_TRUE(verdict.passed) << more << " " << verdict.fault;
      EXPECT_LE(verdict.error, verdict.allowed) << more << " " << verdict.output;
      EXPECT_GT(verdict.allowed, 0) << more << " " << verdict.output;
    }
  }
}

TEST(ToolsVerify, OneWrongGradientFails) {
  for (size_t n = 0; n < kNumGradients; ++n) {
    Backward run(kGradientLine);
    Array& array = run.got.*kGradients[n].gradient;  // query 0 sees key 0
    const double right = array.at(0), allowed = run.verdicts()[n].allowed;
    for (const double wrong : {right + 20 * allowed, double{NAN}, HUGE_VAL}) {
      array.set(0, wrong);
      const std::vector<Verdict> verdicts = run.verdicts();
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
    Backward run(line);
    constexpr int64_t kHidden = 2 * 2 * 4 + 1;
    const double right = run.got.query.at(kHidden);
    EXPECT_TRUE(run.verdicts()[0].passed);
    EXPECT_EQ(right == 0, std::string(line).find("--accumulate") == std::string::npos);
    for (const double wrong : {right + 1e-6, double{NAN}}) {
      run.got.query.set(kHidden, wrong);
      EXPECT_FALSE(run.verdicts()[0].passed) << line << " " << wrong;
    }
  }
}

TEST(ToolsVerify, GradientsThatWereNotWrittenFail) {
  Backward run("1x2x6x4 --bias 1,h,q,k");
  for (const GradientName& name : kGradients) unwrite(run.got.*name.gradient);
  const std::vector<Verdict> verdicts = run.verdicts();
  EXPECT_EQ(verdicts.size(), 4u);
  for (const Verdict& verdict : verdicts) EXPECT_FALSE(verdict.passed) << verdict.output;
}

TEST(ToolsVerify, OnlyWhatIsNeededIsJudged) {
  const std::vector<Verdict> verdicts = Backward("1x2x6x4 --alibi --needs value,alibi_slopes").verdicts();
  ASSERT_EQ(verdicts.size(), 2u);
  EXPECT_EQ(verdicts[0].output, "grad_value");
  EXPECT_EQ(verdicts[1].output, "grad_alibi_slopes");
}

// One query and one key, so P = 1: the sums have few terms, which are added up here by hand.
TEST(ToolsVerify, MagnitudesAreSumsOfAbsoluteTerms) {
  for (const char* more : {"", " --scale -0.5", " --accumulate"}) {
    const Backward run(std::string("1x1x1x3/2 --dtype f64 --logsumexp --bias 1,1,1,1 --bias-dtype f64 --seed 5") +
                       more);
    const BackwardInputs& in = run.in;
    const auto value = [](const Array& a, int64_t n) { return a.given() ? std::fabs(a.at(n)) : 0; };
    double a = value(in.grad_logsumexp, 0);  // sum |dO V| + sum |dO O| + |dL|
    for (int64_t d = 0; d < 2; ++d) a += value(in.grad_out, d) * (value(in.forward.value, d) + value(in.out, d));
    const double scale = std::fabs(run.problem.desc.scale.value_or(1 / std::sqrt(3.0)));
    const Gradients &magnitude = run.want.magnitude, &held = in.before;
    for (int64_t d = 0; d < 3; ++d) {
      EXPECT_NEAR(magnitude.query.at(d), scale * a * value(in.forward.key, d) + value(held.query, d), 1e-14);
      EXPECT_NEAR(magnitude.key.at(d), scale * a * value(in.forward.query, d) + value(held.key, d), 1e-14);
    }
    for (int64_t d = 0; d < 2; ++d) {
      EXPECT_NEAR(magnitude.value.at(d), value(in.grad_out, d) + value(held.value, d), 1e-14);
    }
    EXPECT_NEAR(magnitude.attn_bias.at(0), a + value(held.attn_bias, 0), 1e-14);
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

// Few elements are judged too, with room for their noise: 64 independent ones stray by an eighth.
TEST_F(ToolsErrors, FewElementsAreJudged) {
  const auto complaints_of = [&](size_t count, double error) {
    std::vector<double> got = exact_;
    for (size_t n = 0; n < count; ++n) got[n] += n % 2 == 0 ? error : -error;
    const int64_t dims[] = {static_cast<int64_t>(count)};
    Errors errors("x", {100, 1.1, 1});
    const auto first = [&](const std::vector<double>& all) { return std::span(all).first(count); };
    errors.add({DType::kFloat32, dims, first(got), first(exact_), first(yardstick_), std::vector<double>(count, 1e-3)});
    return errors.complaints();
  };
  const double rmse = 1e-4 / std::sqrt(3.0);
  EXPECT_TRUE(complaints_of(64, rmse).empty());
  EXPECT_TRUE(complaints_of(64, 1.5 * rmse).empty());
  EXPECT_EQ(complaints_of(64, 2.5 * rmse).size(), 1u);
  EXPECT_TRUE(complaints_of(1024, 1.05 * rmse).empty());
  EXPECT_EQ(complaints_of(1024, 1.35 * rmse).size(), 1u);
}

// bfloat16 with shifted logits: what rounding P and dS may do to a sum, and no more.
TEST(ToolsVerify, GradientsOfShiftedBfloat16AreJudged) {
  Backward run("1x8x128/96x32 --dtype bf16 --fill shift_up");
  EXPECT_TRUE(verdict_of(run.verdicts(), "grad_query").passed);
  const Array& magnitude = run.want.magnitude.query;
  for (int64_t n = 0; n < run.got.query.size(); ++n) {
    run.got.query.set(n, run.want.exact.query.at(n) + (n % 2 == 0 ? 1 : -1) * 0x1p-7 * magnitude.at(n));
  }
  EXPECT_NE(verdict_of(run.verdicts(), "grad_query").fault.find("RMSE"), std::string::npos);
}

}  // namespace
}  // namespace polyhead::tools
