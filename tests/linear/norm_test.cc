// LayerNorm and RMSNorm: every kernel of src/linear against the definition. POLYHEAD_TEST_KERNEL=name tests that one
// alone.
#include <gtest/gtest.h>

#include <cmath>

#include "core/sentence.h"
#include "linear_harness.h"
#include "random_problems.h"
#include "reference/linear.h"
#include "testing/problem_words.h"

namespace polyhead::testing {
namespace {

using linear::Norm;

struct NormProblem {
  Norm norm = Norm::kLayerNorm;
  DType dtype = DType::kFloat32;
  bool float32_parameters = false;
  std::vector<int64_t> rows{1}, columns{1};
  double eps = 1e-5, mean = 0;
  bool gamma = true, beta = true, residual = false, sum = false, statistics = true;
  bool grad_x = true, grad_gamma = true, grad_beta = true, accumulate_x = false, accumulate_parameters = false;
  uint64_t seed = 1;
};

int64_t size_of(const std::vector<int64_t>& dims) {
  int64_t size = 1;
  for (int64_t d : dims) size *= d;
  return size;
}

std::vector<int64_t> joined(std::vector<int64_t> first, const std::vector<int64_t>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

std::string to_string(const NormProblem& p) {
  std::string text = sentence(p.norm == Norm::kLayerNorm ? "LayerNorm " : "RMSNorm ", dtype_name(p.dtype), " [");
  for (int64_t d : p.rows) text += sentence(d, " ");
  append(text, "|");
  for (int64_t d : p.columns) text += sentence(" ", d);
  return text + sentence("] seed ", p.seed);
}

struct NormInputs {
  Array x, residual, gamma, beta, grad_y, grad_residual, grad_x, grad_gamma, grad_beta, mean, rstd;
};

NormInputs norm_inputs(const NormProblem& p, uint64_t seed) {
  NormInputs in;
  const DType parameter = p.float32_parameters ? DType::kFloat32 : p.dtype;
  const std::vector<int64_t> dims = joined(p.rows, p.columns);
  auto next = [&, n = seed * 16](DType dtype, const std::vector<int64_t>& sizes) mutable {
    return random_array(dtype, sizes, ++n);
  };
  in.x = next(p.dtype, dims);
  for (int64_t n = 0; n < in.x.size(); ++n) in.x.set(n, in.x.at(n) + p.mean);
  if (p.residual) in.residual = next(p.dtype, dims);
  if (p.gamma) in.gamma = next(parameter, p.columns);
  if (p.beta) in.beta = next(parameter, p.columns);
  in.grad_y = next(p.dtype, dims);
  if (p.residual) in.grad_residual = next(p.dtype, dims);
  if (p.accumulate_x) in.grad_x = next(p.dtype, dims);
  in.grad_gamma = next(parameter, p.columns);
  in.grad_beta = next(parameter, p.columns);
  return in;
}

NormInputs widened(const NormInputs& in) {
  const auto wide = [](const Array& array) { return testing::widened(array); };
  return {wide(in.x),         wide(in.residual),      wide(in.gamma),  wide(in.beta),
          wide(in.grad_y),    wide(in.grad_residual), wide(in.grad_x), wide(in.grad_gamma),
          wide(in.grad_beta), wide(in.mean),          wide(in.rstd)};
}

using Forward = std::function<void(const linear::NormForwardArgs&)>;
using Backward = std::function<void(const linear::NormBackwardArgs&)>;

CallResult forward(const Forward& call, const NormProblem& p, const NormInputs& in, const CallOptions& options) {
  Operands operands(options);
  const size_t rows = p.rows.size();
  const DType statistic = in.x.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  linear::NormForwardArgs args;
  args.norm = p.norm;
  args.eps = p.eps;
  args.x = operands.input("x", in.x, rows);
  args.residual = operands.input("residual", in.residual, rows);
  args.gamma = operands.input("gamma", in.gamma, 0);
  args.beta = operands.input("beta", in.beta, 0);
  args.y = operands.output("y", in.x.dtype, in.x.dims, rows);
  if (p.sum) args.sum = operands.output("sum", in.x.dtype, in.x.dims, rows);
  if (p.statistics) {
    if (p.norm == Norm::kLayerNorm) args.mean = operands.vector("mean", statistic, size_of(p.rows));
    args.rstd = operands.vector("rstd", statistic, size_of(p.rows));
  }
  call(args);
  return operands.written();
}

CallResult backward(const linear::Kernel* kernel, const Backward& call, const NormProblem& p, const NormInputs& in,
                    const CallOptions& options) {
  Operands operands(options);
  const size_t rows = p.rows.size();
  linear::NormBackwardArgs args;
  args.norm = p.norm;
  args.x = operands.input("x", in.x, rows);
  args.gamma = operands.input("gamma", in.gamma, 0);
  if (p.norm == Norm::kLayerNorm) args.mean = operands.vector("mean", in.mean);
  args.rstd = operands.vector("rstd", in.rstd);
  args.grad_y = operands.input("grad_y", in.grad_y, rows);
  args.residual = operands.input("grad_residual", in.grad_residual, rows);
  args.accumulate_x = p.accumulate_x;
  args.accumulate_parameters = p.accumulate_parameters;
  if (p.grad_x) {
    args.grad_x = p.accumulate_x ? operands.updated("grad_x", in.grad_x, rows)
                                 : operands.output("grad_x", in.x.dtype, in.x.dims, rows);
  }
  const auto parameter = [&](const char* name, const Array& old) {
    return p.accumulate_parameters ? operands.updated(name, old, 0) : operands.output(name, old.dtype, old.dims, 0);
  };
  if (p.grad_gamma) args.grad_gamma = parameter("grad_gamma", in.grad_gamma);
  if (p.grad_beta) args.grad_beta = parameter("grad_beta", in.grad_beta);
  if (kernel) {
    args.workspace =
        operands.workspace(kernel->sums_workspace_bytes(size_of(p.rows), size_of(p.columns), p.dtype).value());
  }
  call(args);
  return operands.written();
}

CallResult forward(const linear::Kernel& kernel, const NormProblem& p, const NormInputs& in,
                   const CallOptions& options) {
  return forward([&](const auto& args) { expect_ok(kernel.norm_forward(args, executor(options.threads))); }, p, in,
                 options);
}
CallResult backward(const linear::Kernel& kernel, const NormProblem& p, const NormInputs& in,
                    const CallOptions& options) {
  return backward(
      &kernel, [&](const auto& args) { expect_ok(kernel.norm_backward(args, executor(options.threads))); }, p, in,
      options);
}

// What a row is made of, in float64.
struct Row {
  double mean = 0, rstd = 0, size = 0;  // size: the mean of |x| + |mean|, which is what cancels
};

Row row_of(const NormProblem& p, const NormInputs& in, int64_t m, int64_t n) {
  Row row;
  const auto x = [&](int64_t i) { return in.x.at(m * n + i) + (in.residual.given() ? in.residual.at(m * n + i) : 0); };
  for (int64_t i = 0; i < n; ++i) row.mean += p.norm == Norm::kLayerNorm ? x(i) / static_cast<double>(n) : 0;
  double square = 0;
  for (int64_t i = 0; i < n; ++i) {
    square += (x(i) - row.mean) * (x(i) - row.mean) / static_cast<double>(n);
    row.size += (std::fabs(x(i)) + std::fabs(row.mean)) / static_cast<double>(n);
  }
  row.rstd = 1 / std::sqrt(square + p.eps);
  return row;
}

// The sums of the absolute values of the terms, for each output.
Arrays magnitudes(const NormProblem& p, const NormInputs& in) {
  const int64_t m_size = size_of(p.rows), n = size_of(p.columns);
  Arrays all;
  for (const char* name : {"y", "sum", "grad_x"}) all[name] = Array(DType::kFloat64, in.x.dims);
  for (const char* name : {"grad_gamma", "grad_beta"}) all[name] = Array(DType::kFloat64, p.columns);
  for (const char* name : {"mean", "rstd"}) all[name] = Array(DType::kFloat64, {m_size});
  Array &y = all["y"], &sum = all["sum"], &grad_x = all["grad_x"], &grad_gamma = all["grad_gamma"],
        &grad_beta = all["grad_beta"], &mean = all["mean"], &rstd = all["rstd"];
  const auto add = [](Array& to, int64_t at, double value) { to.set(at, to.at(at) + value); };
  for (int64_t m = 0; m < m_size; ++m) {
    const Row row = row_of(p, in, m, n);
    add(mean, m, row.size);
    add(rstd, m, row.rstd);
    double gradient = 0, projection = 0;
    const auto gamma = [&](int64_t i) { return p.gamma ? std::fabs(in.gamma.at(i)) : 1; };
    const auto normed = [&](int64_t i) { return (std::fabs(in.x.at(m * n + i)) + std::fabs(row.mean)) * row.rstd; };
    for (int64_t i = 0; i < n; ++i) {
      const double g = std::fabs(in.grad_y.at(m * n + i)) * gamma(i);
      gradient += g / static_cast<double>(n);
      projection += g * normed(i) / static_cast<double>(n);
    }
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = m * n + i;
      const double x = std::fabs(in.x.at(at)) + (in.residual.given() ? std::fabs(in.residual.at(at)) : 0);
      add(sum, at, x);
      add(y, at, (x + std::fabs(row.mean)) * row.rstd * gamma(i) + (p.beta ? std::fabs(in.beta.at(i)) : 0));
      const double g = std::fabs(in.grad_y.at(at));
      add(grad_x, at, (g * gamma(i) + gradient + normed(i) * projection) * row.rstd);
      if (in.grad_residual.given()) add(grad_x, at, std::fabs(in.grad_residual.at(at)));
      if (p.accumulate_x) add(grad_x, at, std::fabs(in.grad_x.at(at)));
      add(grad_gamma, i, g * normed(i));
      add(grad_beta, i, g);
    }
  }
  for (int64_t i = 0; p.accumulate_parameters && i < n; ++i) {
    add(grad_gamma, i, std::fabs(in.grad_gamma.at(i)));
    add(grad_beta, i, std::fabs(in.grad_beta.at(i)));
  }
  return all;
}

ExpectedArrays expected_forward(const NormProblem& p, uint64_t seed) {
  const NormInputs in = norm_inputs(p, seed);
  return {forward(linear::reference::norm_forward<double>, p, widened(in), {}).arrays,
          forward(linear::reference::norm_forward<float>, p, in, {}).arrays, magnitudes(p, in)};
}

// Inputs of backward: x is the sum, and statistics are those of the naive formula: the same for all kernels.
NormInputs backward_inputs(const NormProblem& p, uint64_t seed) {
  NormInputs in = norm_inputs(p, seed);
  NormProblem whole = p;
  whole.sum = p.residual;
  whole.statistics = true;
  CallResult written = forward(linear::reference::norm_forward<float>, whole, in, {});
  if (p.residual) in.x = written.arrays.at("sum");
  in.residual = {};
  if (p.norm == Norm::kLayerNorm) in.mean = written.arrays.at("mean");
  in.rstd = written.arrays.at("rstd");
  return in;
}

ExpectedArrays expected_backward(const NormProblem& p, uint64_t seed) {
  const NormInputs in = backward_inputs(p, seed);
  return {backward(nullptr, linear::reference::norm_backward<double>, p, widened(in), {}).arrays,
          backward(nullptr, linear::reference::norm_backward<float>, p, in, {}).arrays, magnitudes(p, in)};
}

std::vector<NormProblem> norm_cases() {
  std::vector<NormProblem> list;
  for (Norm norm : {Norm::kLayerNorm, Norm::kRmsNorm}) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      NormProblem p;
      p.norm = norm;
      p.dtype = dtype;
      for (int64_t n : {1, 3, 16, 63, 64, 65, 130, 1024}) {
        p.rows = {n == 65 ? 70 : 9};
        p.columns = {n};
        p.seed = static_cast<uint64_t>(n);
        list.push_back(p);
      }
      p.rows = {2, 5};
      p.columns = {3, 40};
      p.residual = p.sum = p.float32_parameters = true;
      p.accumulate_x = p.accumulate_parameters = true;
      list.push_back(p);
      p.sum = p.gamma = p.beta = p.statistics = p.accumulate_x = p.accumulate_parameters = p.grad_beta = false;
      p.mean = 30;
      list.push_back(p);
      p.grad_gamma = false;
      p.eps = 1e-12;
      list.push_back(p);
      p.grad_x = false;
      p.grad_gamma = true;
      list.push_back(p);
    }
  }
  return list;
}

NormProblem random_norm_problem(uint64_t seed) {
  constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  Random random(seed);
  NormProblem p;
  p.seed = seed;
  p.norm = random.chance(0.5) ? Norm::kLayerNorm : Norm::kRmsNorm;
  p.dtype = kTypes[random.integer(0, 2)];
  p.rows = random_axis(random, 200, 3);
  p.columns = random_axis(random, 500, 2);
  if (size_of(p.columns) == 0) p.columns = {1};
  p.mean = random.chance(0.2) ? 5 : 0;
  for (bool* option : {&p.float32_parameters, &p.gamma, &p.beta, &p.residual, &p.sum, &p.statistics, &p.grad_x,
                       &p.grad_gamma, &p.grad_beta, &p.accumulate_x, &p.accumulate_parameters}) {
    *option = random.chance(0.5);
  }
  return p;
}

// One problem, for every kernel.
class NormDraws {
 public:
  explicit NormDraws(const NormProblem& p)
      : p_(p),
        forward_(p.seed, [this](uint64_t seed) { return expected_forward(p_, seed); }),
        backward_(p.seed, [this](uint64_t seed) { return expected_backward(p_, seed); }) {}

  std::string judge(const linear::Kernel& kernel, const CallOptions& options) {
    std::string text =
        forward_.judge([&](uint64_t seed) { return forward(kernel, p_, norm_inputs(p_, seed), options); });
    if (!text.empty()) return "forward: " + text;
    text = backward_.judge([&](uint64_t seed) { return backward(kernel, p_, backward_inputs(p_, seed), options); });
    return text.empty() ? "" : "backward: " + text;
  }

 private:
  const NormProblem& p_;
  Draws forward_, backward_;
};

std::string line(const linear::Kernel& kernel, const NormProblem& p) {
  return "POLYHEAD_TEST_KERNEL=" + std::string(kernel.name) + ": " + to_string(p);
}

class NormTest : public ::testing::TestWithParam<const linear::Kernel*> {
 protected:
  const linear::Kernel& kernel_ = *GetParam();

  bool takes(const NormProblem& p) const {
    set_running(line(kernel_, p));
    return kernel_.why_not(p.dtype).empty();
  }
};

TEST(NormCases, MatchTheDefinition) {
  for (const NormProblem& p : norm_cases()) {
    NormDraws draws(p);
    for (const linear::Kernel* kernel : linear_kernels_to_test()) {
      if (!kernel->why_not(p.dtype).empty()) continue;
      set_running(line(*kernel, p));
      EXPECT_EQ(draws.judge(*kernel, {1, Layout::kMixed, p.seed}), "") << line(*kernel, p);
    }
  }
}

TEST_P(NormTest, SameBitsForAnyThreadsAndLayout) {
  for (const NormProblem& p : norm_cases()) {
    if (!takes(p)) continue;
    const NormInputs in = norm_inputs(p, p.seed), back = backward_inputs(p, p.seed);
    const CallResult want = forward(kernel_, p, in, {}), want_back = backward(kernel_, p, back, {});
    for (int threads : {2, 3, 7, 0}) {
      EXPECT_EQ(difference(forward(kernel_, p, in, {threads}), want), "") << threads << ": " << line(kernel_, p);
      EXPECT_EQ(difference(backward(kernel_, p, back, {threads}), want_back), "")
          << threads << ": " << line(kernel_, p);
    }
    for (Layout layout : {Layout::kTransposed, Layout::kPadded, Layout::kNegative, Layout::kJunk, Layout::kExpanded}) {
      const CallOptions options{1, layout, 3, Guard::kStart};
      EXPECT_EQ(difference(forward(kernel_, p, in, options), want), "") << layout_name(layout);
      EXPECT_EQ(difference(backward(kernel_, p, back, options), want_back), "") << layout_name(layout);
    }
  }
}

// y may be x, sum may be the residual, grad_x may be grad_y.
TEST_P(NormTest, ComputesInPlace) {
  for (Norm norm : {Norm::kLayerNorm, Norm::kRmsNorm}) {
    NormProblem p;
    p.norm = norm;
    p.rows = {7};
    p.columns = {83};
    p.residual = p.sum = true;
    if (!takes(p)) continue;
    const NormInputs in = norm_inputs(p, 1);
    const CallResult want = forward(kernel_, p, in, {});
    Array x = in.x, residual = in.residual, gamma = in.gamma, beta = in.beta;
    linear::NormForwardArgs args;
    args.norm = norm;
    args.x = args.y = linear::matrix(x.bytes.data(), x.dtype, 7, 83);
    args.residual = args.sum = linear::matrix(residual.bytes.data(), x.dtype, 7, 83);
    args.gamma = linear::matrix(gamma.bytes.data(), x.dtype, 1, 83);
    args.beta = linear::matrix(beta.bytes.data(), x.dtype, 1, 83);
    expect_ok(kernel_.norm_forward(args, executor(2)));
    EXPECT_EQ(difference("y", x, want.arrays.at("y")), "");
    EXPECT_EQ(difference("sum", residual, want.arrays.at("sum")), "");

    const NormInputs back = backward_inputs(p, 1);
    const CallResult want_back = backward(kernel_, p, back, {});
    Array grad = back.grad_y;
    linear::NormBackwardArgs b;
    b.norm = norm;
    b.x = linear::matrix(back.x.bytes.data(), x.dtype, 7, 83);
    b.gamma = args.gamma;
    b.mean = back.mean.bytes.data();
    b.rstd = back.rstd.bytes.data();
    b.grad_y = b.grad_x = linear::matrix(grad.bytes.data(), x.dtype, 7, 83);
    b.residual = linear::matrix(back.grad_residual.bytes.data(), x.dtype, 7, 83);
    expect_ok(kernel_.norm_backward(b, executor(2)));
    EXPECT_EQ(difference("grad_x", grad, want_back.arrays.at("grad_x")), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, NormTest, ::testing::ValuesIn(linear_kernels_to_test()),
                         [](const auto& each) { return std::string(each.param->name); });

TEST(NormRandom, ProblemsAreComputedAsDefined) {
  const uint64_t first = from_environment("POLYHEAD_RANDOM_SEED", 1);
  const uint64_t count = from_environment("POLYHEAD_RANDOM_PROBLEMS", 120);
  int failures = 0;
  for (uint64_t seed = first; seed < first + count && failures < 20; ++seed) {
    const NormProblem p = random_norm_problem(seed);
    NormDraws draws(p);
    for (const linear::Kernel* kernel : linear_kernels_to_test()) {
      if (!kernel->why_not(p.dtype).empty()) continue;
      set_running(line(*kernel, p));
      const Guard guard = seed % 2 == 0 ? Guard::kEnd : Guard::kStart;
      const std::string text = draws.judge(*kernel, {static_cast<int>(seed % 4), Layout::kMixed, seed, guard});
      EXPECT_EQ(text, "") << line(*kernel, p) << "\nPOLYHEAD_RANDOM_SEED=" << seed
                          << " POLYHEAD_RANDOM_PROBLEMS=1 repeats it";
      failures += !text.empty();
    }
  }
}

}  // namespace
}  // namespace polyhead::testing
