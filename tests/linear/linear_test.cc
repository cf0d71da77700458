// Products and epilogues: every kernel of src/linear against the definition. POLYHEAD_TEST_KERNEL=name tests that one
// alone, POLYHEAD_TEST_CASES=name,name those cases; POLYHEAD_RANDOM_SEED=first POLYHEAD_RANDOM_PROBLEMS=count choose the
// random problems.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "contract/kernel.h"
#include "core/sentence.h"
#include "linear_problem.h"
#include "polyhead/dropout.h"
#include "random_problems.h"
#include "testing/problem_words.h"

namespace polyhead::testing {
namespace {

using linear::Activation;

LinearProblem product(const char* name, int64_t m, int64_t n, int64_t k, DType dtype = DType::kFloat32) {
  LinearProblem p;
  p.name = name;
  p.rows = {m};
  p.columns = {n};
  p.terms = {k};
  p.dtype = p.out_dtype = dtype;
  return p;
}

// Everything an epilogue has, on a product that spans two chunks of K and more than a panel.
std::vector<LinearProblem> epilogues() {
  std::vector<LinearProblem> list;
  for (Activation activation :
       {Activation::kNone, Activation::kRelu, Activation::kGelu, Activation::kGeluTanh, Activation::kSilu}) {
    for (bool gradient : {false, true}) {
      for (bool is_product : {false, true}) {
        LinearProblem p = product("epilogue", 1, 70, 300);
        p.rows = {3, 9};
        p.product = is_product;
        p.sums = !is_product;
        p.epilogue.activation = activation;
        p.epilogue.gradient = gradient;
        p.epilogue.pre_activation = !gradient;
        p.epilogue.bias = true;
        p.epilogue.dropout_p = 0.25;
        p.epilogue.residual = true;
        p.seed = static_cast<uint64_t>(activation) + 1;
        list.push_back(p);
      }
    }
  }
  return list;
}

std::vector<LinearProblem> all_cases() {
  std::vector<LinearProblem> list = epilogues();
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t m : {1, 11, 13, 200, 300}) list.push_back(product("rows", m, 33, 67, dtype));
    for (int64_t m : {1, 2, 3, 4, 5, 8, 9, 12}) list.push_back(product("few_rows", m, 100, 1041, dtype));
    for (int64_t m : {16, 17, 33, 96, 97}) list.push_back(product("tiles_of_rows", m, 70, 602, dtype));
    list.push_back(product("few_rows_wide", 12, 700, 9, dtype));
    list.push_back(product("few_rows_even", 12, 700, 1042, dtype));   // B's contiguous columns whole words apart
    list.push_back(product("few_columns_wide", 13, 300, 40, dtype));  // and more of them than rows, in parts of 132
    for (int64_t n : {1, 16, 31, 600}) list.push_back(product("columns", 14, n, 40, dtype));
    for (int64_t k : {0, 1, 255, 257, 513, 769, 1025, 1537, 3000}) list.push_back(product("terms", 25, 34, k, dtype));
    list.push_back(product("blocks", 193, 513, 35, dtype));
    for (const int64_t m : {40, 300}) {  // several parts of columns, of whole panels, one chunk of terms and more
      for (const int64_t k : {40, 1100}) {
        LinearProblem p = product("biased_parts", m, 600, k, dtype);
        p.epilogue.bias = true;
        list.push_back(p);
      }
    }
    LinearProblem p = product("weight_gradient", 40, 50, 5000, dtype);
    p.split_k = true;
    p.epilogue.accumulate = true;
    list.push_back(p);
    for (int64_t k : {40, 1100}) {
      for (int64_t m : {2, 25}) {
        p = product("bias", m, 70, k, dtype);
        p.epilogue.bias = true;
        list.push_back(p);
        p.name = "bias_accumulate";
        p.epilogue.accumulate = true;
        list.push_back(p);
        p.name = "accumulate";
        p.epilogue.bias = false;
        list.push_back(p);
      }
    }
    p = product("wide_sum", 9, 40, 100, dtype);
    p.out_dtype = DType::kFloat32;
    list.push_back(p);
    p = product("heads", 1, 1, 1, dtype);
    p.rows = {2, 3, 5};
    p.columns = {3, 20};
    p.terms = {2, 24};
    list.push_back(p);
  }
  list.push_back(product("row_wide", 1, 8300, 3));
  for (int64_t k : {40, 800}) {
    for (const bool accumulate : {false, true}) {
      LinearProblem p = product("columns_that_drop", 20, 290, k);
      p.epilogue.accumulate = accumulate;
      p.epilogue.bias = p.epilogue.pre_activation = p.epilogue.residual = true;
      p.epilogue.activation = Activation::kGelu;
      p.epilogue.dropout_p = 0.25;
      list.push_back(p);
    }
  }
  list.push_back(product("no_rows", 0, 5, 7));
  list.push_back(product("no_columns", 5, 0, 7));
  LinearProblem p = product("tall_weight_gradient", 1030, 8, 2100);  // and its transpose: sums in one order
  p.split_k = true;
  list.push_back(p);
  p = product("drop_all", 5, 300, 7);
  p.epilogue.dropout_p = 1;
  list.push_back(p);
  return list;
}

std::vector<LinearProblem> linear_cases() {
  std::vector<LinearProblem> list = all_cases();
  const char* const names = std::getenv("POLYHEAD_TEST_CASES");
  if (names == nullptr) return list;
  const std::string asked = sentence(",", names, ",");
  std::erase_if(list, [&](const LinearProblem& p) { return asked.find("," + p.name + ",") == std::string::npos; });
  EXPECT_FALSE(list.empty()) << names;
  return list;
}

std::string line(const linear::Kernel& kernel, const LinearProblem& p) {
  return "POLYHEAD_TEST_KERNEL=" + std::string(kernel.name) + ": " + to_string(p);
}

class Linear : public ::testing::TestWithParam<const linear::Kernel*> {
 protected:
  const linear::Kernel& kernel_ = *GetParam();

  // Whether the kernel takes the problem; says what runs in case it crashes.
  bool takes(const LinearProblem& p) const {
    set_running(line(kernel_, p));
    return kernel_.why_not(p.dtype).empty();
  }
};

TEST(LinearCases, MatchTheDefinition) {
  for (LinearProblem p : linear_cases()) {
    Draws draws = draws_of(p);
    for (const linear::Kernel* kernel : linear_kernels_to_test()) {
      if (!kernel->why_not(p.dtype).empty()) continue;
      for (bool packed : {false, true}) {
        p.packed = packed;
        set_running(line(*kernel, p));
        const CallOptions options{1, p.layout, p.seed + packed, packed ? Guard::kStart : Guard::kEnd};
        EXPECT_EQ(judge(*kernel, p, options, draws), "") << line(*kernel, p);
        if (!p.product) break;
      }
    }
  }
}

TEST_P(Linear, SameBitsForAnyThreadsAndLayout) {
  for (const LinearProblem& p : linear_cases()) {
    if (!takes(p)) continue;
    const LinearInputs in = linear_inputs(p, p.seed);
    const CallResult want = run(kernel_, p, in);
    for (int threads : {2, 3, 7, 0}) {
      EXPECT_EQ(difference(run(kernel_, p, in, {threads}), want), "") << threads << " threads: " << line(kernel_, p);
    }
    Guard guard = Guard::kStart;
    for (Layout layout : {Layout::kTransposed, Layout::kPadded, Layout::kNegative, Layout::kJunk, Layout::kMixed}) {
      EXPECT_EQ(difference(run(kernel_, p, in, {1, layout, 7, guard}), want), "")
          << layout_name(layout) << ": " << line(kernel_, p);
      guard = guard == Guard::kStart ? Guard::kEnd : Guard::kStart;
    }
    if (!p.product) continue;
    for (int threads : {1, 3}) {
      for (Guard end : {Guard::kStart, Guard::kEnd}) {
        EXPECT_EQ(difference(run(kernel_, p, in, {threads, Layout::kBshd, 1, end, true}), want), "")
            << "weights transposed, " << threads << " threads: " << line(kernel_, p);
      }
    }
    LinearProblem packed = p;
    packed.packed = true;
    EXPECT_EQ(difference(run(kernel_, packed, in, {2}), want), "") << "packed: " << line(kernel_, p);
  }
}

// Products and numbers below 2^-126: whatever a kernel makes of them, it does the same wherever B lies and however many rows there
// are. Powers of two that A and B are multiplied by: products, then numbers of B, that are subnormal.
TEST_P(Linear, TinyProductsHaveTheSameBitsToo) {
  const std::pair<int, int> powers[] = {{-60, -62}, {10, -130}};
  for (const auto& [of_a, of_b] : powers) {
    for (const int64_t m : {1, 2, 20, 40}) {
      LinearProblem p = product("tiny_products", m, 100, 1042, DType::kBFloat16);
      p.out_dtype = DType::kFloat32;
      if (!takes(p)) GTEST_SKIP() << kernel_.why_not(p.dtype);
      LinearInputs in = linear_inputs(p, 1);
      for (int64_t i = 0; i < in.a.size(); ++i) in.a.set(i, std::ldexp(in.a.at(i), of_a - static_cast<int>(i % 7)));
      for (int64_t i = 0; i < in.b.size(); ++i) in.b.set(i, std::ldexp(in.b.at(i), of_b));
      const CallResult want = run(kernel_, p, in);
      EXPECT_EQ(difference(run(kernel_, p, in, {1, Layout::kBshd, 1, Guard::kEnd, true}), want), "")
          << "weights transposed: " << line(kernel_, p);
      LinearProblem packed = p, first = p;
      packed.packed = true;
      EXPECT_EQ(difference(run(kernel_, packed, in), want), "") << "packed: " << line(kernel_, p);
      first.rows = {1};
      const Array row = run(kernel_, first, rows_of(p, in, 0, 1)).arrays.at("out");
      for (int64_t n = 0; n < p.n(); ++n) {
        EXPECT_EQ(row.at(n), want.arrays.at("out").at(n)) << n << ": " << line(kernel_, p);
      }
    }
  }
}

TEST_P(Linear, ARowDoesNotDependOnTheOthers) {
  for (const LinearProblem& p : linear_cases()) {
    if (!takes(p) || p.split_k || p.sums || p.epilogue.dropout_p > 0 || p.m() < 2) continue;
    const LinearInputs in = linear_inputs(p, p.seed);
    Array whole = run(kernel_, p, in).arrays.at("out");
    whole.dims = {p.m(), p.n()};
    for (int64_t first : {int64_t{0}, p.m() / 2, p.m() - 1}) {
      LinearProblem part = p;
      part.rows = {1};
      Array row = run(kernel_, part, rows_of(p, in, first, first + 1)).arrays.at("out");
      row.dims = {1, p.n()};
      EXPECT_EQ(difference("out", row, rows(whole, first, first + 1)), "")
          << "row " << first << ": " << line(kernel_, p);
    }
  }
}

// NaN reaches what it belongs to, and nothing else.
TEST_P(Linear, NanStaysInItsRowAndColumn) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (bool packed : {false, true}) {
      LinearProblem p = product("nan", 29, 70, 301, dtype);
      p.packed = packed;
      if (!takes(p)) continue;
      LinearInputs in = linear_inputs(p, 1);
      const Array clean = run(kernel_, p, in).arrays.at("out");
      in.a.set(13 * 301 + 300, NAN);
      in.b.set(7 * 70 + 65, NAN);
      const Array out = run(kernel_, p, in).arrays.at("out");
      for (int64_t i = 0; i < out.size(); ++i) {
        const bool hit = i / 70 == 13 || i % 70 == 65;
        ASSERT_TRUE(hit ? std::isnan(out.at(i)) : out.at(i) == clean.at(i)) << i << ": " << line(kernel_, p);
      }
    }
  }
}

TEST_P(Linear, DropsWhatDropoutMaskSays) {
  LinearProblem p = product("mask", 1, 333, 5);
  p.rows = {2, 3, 7};
  p.epilogue.dropout_p = 0.4;
  if (!takes(p)) GTEST_SKIP() << kernel_.why_not(p.dtype);
  const Array out = run(kernel_, p, linear_inputs(p, 1)).arrays.at("out");
  std::vector<char> kept(static_cast<size_t>(out.size()));
  ASSERT_TRUE(dropout_mask(0.4, p.seed * 0x123456789abcdef, static_cast<uint32_t>(p.seed),
                           Tensor(kept.data(), DType::kBool, {2, 3, 7, 333}))
                  .ok());
  for (int64_t i = 0; i < out.size(); ++i) EXPECT_EQ(out.at(i) != 0, kept[static_cast<size_t>(i)] != 0) << i;
}

// Activations far out: values as defined, and no NaN.
TEST_P(Linear, ActivationsAreSafeEverywhere) {
  for (Activation activation : {Activation::kRelu, Activation::kGelu, Activation::kGeluTanh, Activation::kSilu}) {
    for (bool gradient : {false, true}) {
      LinearProblem p = product("far", 1, 4001, 1);
      p.product = false;
      p.epilogue.activation = activation;
      p.epilogue.gradient = gradient;
      if (!takes(p)) GTEST_SKIP() << kernel_.why_not(p.dtype);
      LinearInputs in = linear_inputs(p, 1);
      Array& x = gradient ? in.pre_activation : in.a;
      for (int64_t i = 0; i < x.size(); ++i) {
        const double t = static_cast<double>(i - 2000) / 2000;
        x.set(i, i % 2 == 0 ? 12 * t : std::copysign(std::pow(10.0, 30 * std::fabs(t) - 15), t));
      }
      Draws draw(1, [&](uint64_t) { return expected(p, in); });
      EXPECT_EQ(draw.judge([&](uint64_t) { return run(kernel_, p, in); }), "") << line(kernel_, p);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Linear, ::testing::ValuesIn(linear_kernels_to_test()),
                         [](const auto& each) { return std::string(each.param->name); });

TEST(LinearRandom, ProblemsAreComputedAsDefined) {
  const uint64_t first = from_environment("POLYHEAD_RANDOM_SEED", 1);
  const uint64_t count = from_environment("POLYHEAD_RANDOM_PROBLEMS", 120);
  int failures = 0;
  for (uint64_t seed = first; seed < first + count && failures < 20; ++seed) {
    const LinearProblem p = random_linear_problem(seed);
    Draws draws = draws_of(p);
    for (const linear::Kernel* kernel : linear_kernels_to_test()) {
      if (!kernel->why_not(p.dtype).empty()) continue;
      set_running(line(*kernel, p));
      const Guard guard = seed % 2 == 0 ? Guard::kEnd : Guard::kStart;
      const CallOptions options{static_cast<int>(seed % 4), Layout::kMixed, seed, guard};
      std::string text = judge(*kernel, p, options, draws);
      const LinearInputs in = linear_inputs(p, seed);
      if (text.empty()) text = difference(run(*kernel, p, in, options), run(*kernel, p, in, {3}));
      EXPECT_EQ(text, "") << line(*kernel, p) << "\nPOLYHEAD_RANDOM_SEED=" << seed
                          << " POLYHEAD_RANDOM_PROBLEMS=1 repeats it";
      failures += !text.empty();
    }
  }
}

TEST(LinearList, HasTheAttentionKernelsNames) {
  const auto kernels = linear::kernel_list();
  ASSERT_EQ(kernels.size(), kernel_list().size());
  for (size_t i = 0; i < kernels.size(); ++i) {
    EXPECT_STREQ(kernels[i]->name, kernel_list()[i]->name);
    EXPECT_EQ(linear::find_kernel(kernels[i]->name), kernels[i]);
  }
  EXPECT_EQ(linear::find_kernel("cpu"), nullptr);
}

TEST(LinearList, ChoosesAndSaysWhyNot) {
  const Result<const linear::Kernel*> wide = linear::choose_kernel(DType::kFloat64, "reference", Device::kCpu);
  ASSERT_TRUE(wide.ok()) << wide.status().message();
  EXPECT_STREQ((*wide)->name, "reference");
  const Result<const linear::Kernel*> forced = linear::choose_kernel(DType::kFloat64, "cpu_generic", Device::kCpu);
  EXPECT_EQ(forced.status().message(),
            "kernel is cpu_generic, which cannot compute this: dtype is float64, takes float32, bfloat16 or float16; "
            "these can: reference");
  const Result<const linear::Kernel*> unknown = linear::choose_kernel(DType::kFloat32, "cpu_avx1024", Device::kCpu);
  EXPECT_EQ(unknown.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(unknown.status().message().rfind("kernel is cpu_avx1024, the kernels with matrix products are ", 0), 0u);
}

}  // namespace
}  // namespace polyhead::testing
