// The gradients of every kernel on every case. POLYHEAD_TEST_KERNEL=name tests that one alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "attention/reference.h"
#include "gradient_cases.h"
#include "gradient_definition.h"
#include "gradient_harness.h"
#include "gradient_poison.h"
#include "kernels_to_test.h"

namespace polyhead::testing {
namespace {

struct Param {
  const Kernel* kernel;
  const GradientProblem* problem;
};

// Case by case, so that the kernels share what the definition gives.
std::vector<Param> params() {
  std::vector<Param> list;
  for (const GradientProblem& problem : gradient_cases()) {
    for (const Kernel* kernel : kernels_to_test()) list.push_back({kernel, &problem});
  }
  return list;
}

std::string param_name(const ::testing::TestParamInfo<Param>& info) {
  return std::string(info.param.kernel->name) + "__" + info.param.problem->forward.name;
}

// Through the plan, which checks the arguments and computes problems of which some size is 0.
RunOptions planned() {
  RunOptions options;
  options.through_plan = true;
  return options;
}

class Gradient : public ::testing::TestWithParam<Param> {
 protected:
  Gradient() : kernel_(*GetParam().kernel), problem_(*GetParam().problem), desc_(problem_.forward.desc) {
    set_running(line());
  }

  void SetUp() override {
    if (const std::string why = kernel_.why_not(desc_); !why.empty()) GTEST_SKIP() << why;
    in_ = random_inputs(problem_);
  }

  // The reference takes its time: what it computes is compared on every case, how it does on those of so many products.
  bool too_slow() const {
    double products = static_cast<double>(desc_.head_dim + desc_.head_dim_v);
    for (int64_t size : {desc_.batch, desc_.num_heads, desc_.seqlen_q, desc_.seqlen_k}) {
      products *= static_cast<double>(size);
    }
    return &kernel_ == &kReference && products > 3e5;
  }
  static constexpr const char* kTooSlow = "the reference takes too long for this case; its gradients are compared";

  std::string line() const { return problem_line(kernel_.name, problem_); }

  Gradients run_with(const BackwardInputs& in, const RunOptions& options = planned(),
                     GradientSet asked = kAllGradients) const {
    return run(kernel_, desc_, in, options, asked);
  }

  // The gradients of inputs that the problem has, of the set that a test asks for; query's if none is.
  GradientSet here(GradientSet asked) const {
    const GradientSet inputs = 7u | (desc_.attn_bias.given ? 8u : 0u) | (desc_.alibi_slopes_ndim > 0 ? 16u : 0u);
    return (asked & inputs) == 0 ? 1u : asked & inputs;
  }

  // Which of a run's options makes other bits than `want` by itself.
  std::string what_matters(const Gradients& want, const RunOptions& options, GradientSet asked) const {
    std::string text = "other bits with " + std::to_string(options.threads) + " threads (0: tasks in reverse order), " +
                       layout_name(options.layout) + ", gradients " + std::to_string(asked) + ". Alone:";
    RunOptions alone = planned();
    alone.threads = options.threads;
    if (!difference(run_with(in_, alone), want).empty()) text += " threads";
    alone = planned();
    alone.layout = options.layout;
    if (!difference(run_with(in_, alone), want).empty()) text += " layout";
    alone = planned();
    alone.guard = options.guard;
    if (!difference(run_with(in_, alone), want).empty()) text += " guard";
    if (!difference(run_with(in_, planned(), asked), want, asked).empty()) text += " what is asked for";
    return text;
  }

  const Kernel& kernel_;
  const GradientProblem& problem_;
  const AttentionDesc& desc_;
  BackwardInputs in_;
};

TEST_P(Gradient, MatchesTheDefinition) {
  static const GradientProblem* last = nullptr;
  static ExpectedGradients want;
  if (last != &problem_) want = expected(desc_, in_);
  last = &problem_;
  RunOptions options = planned();
  options.layout = problem_.forward.layout;
  options.layout_seed = problem_.forward.seed;
  GradientProblem all = problem_;  // SameBits shows that what else is asked for changes nothing
  all.asked = kAllGradients;
  EXPECT_EQ(mismatch(kernel_, all, in_, want, options), "") << line();
}

// Eight runs change everything that must not matter at once; the first that differs is taken apart.
TEST_P(Gradient, SameBitsForAnyThreadsLayoutAndSubset) {
  if (too_slow()) GTEST_SKIP() << kTooSlow;
  const Gradients want = run_with(in_);
  EXPECT_EQ(want.faults, std::vector<std::string>()) << line();
  struct Run {
    int threads;
    Layout layout;
    GradientSet asked;
  };
  const Run kRuns[] = {{2, Layout::kBhsd, problem_.asked}, {3, Layout::kTransposed, 1u},
                       {7, Layout::kPadded, 2u},           {0, Layout::kNegative, 4u},
                       {3, Layout::kJunk, 6u | 8u},        {2, Layout::kExpanded, 8u | 16u},
                       {0, Layout::kMixed, kAllGradients}, {7, Layout::kQkv, 3u | 16u}};
  Guard guard = Guard::kStart;
  for (const Run& r : kRuns) {
    RunOptions options = planned();
    options.guard = guard = guard == Guard::kStart ? Guard::kEnd : Guard::kStart;
    options.threads = r.threads;
    options.layout = r.layout;
    const Gradients got = run_with(in_, options, here(r.asked));
    EXPECT_EQ(got.faults, std::vector<std::string>()) << line();
    const std::string text = difference(got, want, here(r.asked));
    EXPECT_EQ(text, "") << what_matters(want, options, here(r.asked)) << "\n" << line();
    if (!text.empty()) return;
  }
}

// Elements of the dims' outermost, all of `first` and then all of `second`.
Array joined(const Array& first, const Array& second) {
  if (!first.given()) return {};
  Array both = first;
  both.dims[0] += second.dims[0];
  both.bytes.insert(both.bytes.end(), second.bytes.begin(), second.bytes.end());
  return both;
}

TEST_P(Gradient, SameBitsForABatchInTwoParts) {
  if (too_slow()) GTEST_SKIP() << kTooSlow;
  if (desc_.batch < 2) return;
  if (desc_.dropout_p > 0 && desc_.dropout_p < 1) return;  // its random numbers count the batch
  const BackwardSlice a = slice_batch(desc_, in_, 0, desc_.batch / 2);
  const BackwardSlice b = slice_batch(desc_, in_, desc_.batch / 2, desc_.batch);
  GradientSet asked = 7;
  if (desc_.attn_bias.given && desc_.attn_bias.dims[0] > 1) asked |= 8;
  if (desc_.alibi_slopes_ndim == 2) asked |= 16;
  const Gradients first = run(kernel_, a.desc, a.inputs, planned(), asked);
  const Gradients second = run(kernel_, b.desc, b.inputs, planned(), asked);
  Gradients whole = run_with(in_, planned(), asked), parts;
  for (const GradientName& name : kGradients) {
    Array &w = whole.*name.gradient, &p = parts.*name.gradient;
    p = joined(first.*name.gradient, second.*name.gradient);
    if (!desc_.packed || !p.given()) continue;
    w.dims[0] = p.dims[0];  // rows behind the end belong to no part
    w.bytes.resize(p.bytes.size());
  }
  EXPECT_EQ(difference(parts, whole, asked), "") << line();
}

TEST_P(Gradient, HiddenIsHidden) {
  if (too_slow()) GTEST_SKIP() << kTooSlow;
  const Gradients clean = run_with(in_);
  for (int n = 0; n < 2; ++n) {
    RunOptions options = planned();
    options.threads = n + 1;
    options.layout = n == 0 ? Layout::kBshd : Layout::kTransposed;
    const BackwardInputs poisoned = poison_hidden(desc_, in_, problem_.forward.seed + static_cast<uint64_t>(n));
    EXPECT_EQ(difference(run_with(poisoned, options), clean), "") << "poisoned where hidden\n" << line();
  }
}

TEST_P(Gradient, VisibleIsVisible) {
  if (too_slow()) GTEST_SKIP() << kTooSlow;
  if (desc_.dropout_p >= 1) return;  // no weight is left that could show it
  const Gradients clean = run_with(in_);
  for (int n = 0; n < kNumGradientPokes; ++n) {
    const PokedBackward poked = poke_visible(desc_, in_, static_cast<GradientPoke>(n), problem_.forward.seed);
    if (!poked.done) continue;
    EXPECT_EQ(poke_mismatch(desc_, poked.inputs, clean, run_with(poked.inputs)), "") << poked.where << "\n" << line();
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Gradient, ::testing::ValuesIn(params()), param_name);

// What the tests above compare with is the reference, bit for bit.
template <class T>
std::string difference_from_reference(const AttentionDesc& desc, const BackwardInputs& in, bool wide) {
  Gradients g = defined_gradients<double>(desc, in, Visibility(desc, in.forward), wide);  // for its dtypes and dims
  const Gradients want = defined_gradients<T>(desc, in, Visibility(desc, in.forward), wide);
  BackwardArgs args = dense_args(in);
  for (const GradientName& name : kGradients) {
    Array& a = g.*name.gradient;
    const Array& before = in.before.*name.gradient;
    std::fill(a.bytes.begin(), a.bytes.end(), uint8_t{0xff});
    for (int64_t n = 0; n < before.size(); ++n) a.set(n, before.at(n));
    args.*name.tensor = view(a);
  }
  reference::backward<T>(desc, args);
  return difference(g, want);
}

TEST(GradientTest, TheDefinitionIsTheReference) {
  int compared = 0;
  for (const GradientProblem& problem : gradient_cases()) {
    const AttentionDesc& d = problem.forward.desc;
    const double pairs = static_cast<double>(d.num_heads * d.seqlen_q) * static_cast<double>(d.batch * d.seqlen_k);
    if (pairs == 0 || pairs * static_cast<double>(d.head_dim + d.head_dim_v) > 4e6) continue;
    const BackwardInputs in = random_inputs(problem);
    EXPECT_EQ(difference_from_reference<double>(d, in, true), "") << problem_line("reference", problem);
    EXPECT_EQ(difference_from_reference<float>(d, in, false), "") << problem_line("reference", problem);
    if (HasFailure()) break;
    ++compared;
  }
  EXPECT_GT(compared, 500);
}

TEST(GradientTest, TestsAKernel) {
  EXPECT_FALSE(kernels_to_test().empty()) << "no kernel of this build has the name in POLYHEAD_TEST_KERNEL";
}

TEST(GradientTest, NamesEachCaseOnce) {
  std::vector<std::string> names;
  for (const GradientProblem& problem : gradient_cases()) names.push_back(problem.forward.name);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
}

}  // namespace
}  // namespace polyhead::testing
