// The gradients of every kernel on every case. POLYHEAD_TEST_KERNEL=name tests that one alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <thread>

#include "far_rows.h"
#include "gradient_cases.h"
#include "gradient_definition.h"
#include "gradient_harness.h"
#include "gradient_poison.h"
#include "kernels_to_test.h"
#include "reference/attention.h"

namespace polyhead::testing {
namespace {

struct Param {
  const Kernel* kernel;
  const GradientProblem* problem;
};

// Case by case, so that the kernels share what belongs to a case.
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

double products(const AttentionDesc& d) {
  double count = static_cast<double>(d.head_dim + d.head_dim_v);
  for (int64_t size : {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k}) count *= static_cast<double>(size);
  return count;
}

// Through the plan, which checks the arguments and computes problems of which some size is 0.
RunOptions planned() {
  RunOptions options;
  options.through_plan = true;
  return options;
}

class Gradient : public ::testing::TestWithParam<Param> {
 protected:
  Gradient()
      : kernel_(*GetParam().kernel),
        problem_(*GetParam().problem),
        desc_(problem_.forward.desc),
        seed_(problem_.forward.seed) {
    set_running(line());
  }

  void SetUp() override {
    if (const std::string why = kernel_.why_not(desc_); !why.empty()) GTEST_SKIP() << why;
  }

  // What `make` gives for a case: made once for all kernels.
  template <class Make>
  const auto& once_per_case(Make make) const {
    static const GradientProblem* last = nullptr;
    static std::optional<decltype(make())> made;
    if (last != &problem_) made = make();
    last = &problem_;
    return *made;
  }

  const BackwardInputs& inputs() const {
    return once_per_case([&] { return random_inputs(problem_); });
  }

  // Naive loops take their time.
  std::string too_slow(double most_products) const {
    if (&kernel_ != &kReference || products(desc_) <= most_products) return "";
    return "the reference is slow, so this runs on problems of at most " + std::to_string(most_products) + " products";
  }

  std::string line() const { return problem_line(kernel_.name, problem_); }

  Gradients run_with(const BackwardInputs& in, const RunOptions& options = planned(),
                     GradientSet asked = kAllGradients) const {
    return run(kernel_, desc_, in, options, asked);
  }

  // Of a set, the gradients of inputs that the problem has; query's if there is none.
  GradientSet here(GradientSet asked) const {
    const GradientSet inputs = 7u | (desc_.attn_bias.given ? 8u : 0u) | (desc_.alibi_slopes_ndim > 0 ? 16u : 0u);
    return (asked & inputs) == 0 ? 1u : asked & inputs;
  }

  // Which of a run's options makes other bits than `want` by itself.
  std::string what_matters(const Gradients& want, const RunOptions& options, GradientSet asked) const {
    std::string text = "other bits with " + std::to_string(options.threads) + " threads (0: tasks in reverse order), " +
                       layout_name(options.layout) + ", gradients " + std::to_string(asked) + ". Alone:";
    auto matters = [&](const RunOptions& alone, GradientSet set) {
      return !difference(run_with(inputs(), alone, set), want, set).empty();
    };
    RunOptions threads = planned(), layout = planned(), guard = planned();
    threads.threads = options.threads;
    layout.layout = options.layout;
    guard.guard = options.guard;
    if (matters(threads, kAllGradients)) text += " threads";
    if (matters(layout, kAllGradients)) text += " layout";
    if (matters(guard, kAllGradients)) text += " guard";
    if (matters(planned(), asked)) text += " what is asked for";
    return text;
  }

  const Kernel& kernel_;
  const GradientProblem& problem_;
  const AttentionDesc& desc_;
  const uint64_t seed_;
};

TEST_P(Gradient, MatchesTheDefinition) {
  if (const std::string why = too_slow(5e6); !why.empty()) GTEST_SKIP() << why;
  const ExpectedGradients& want = once_per_case([&] { return expected(desc_, inputs()); });
  RunOptions options = planned();
  options.layout = problem_.forward.layout;
  options.layout_seed = seed_;
  GradientProblem all = problem_;  // SameBits shows that what else is asked for changes nothing
  all.asked = kAllGradients;
  EXPECT_EQ(mismatch(kernel_, all, inputs(), want, options), "") << line();
}

// Six runs, each of which changes all that must not matter; the first that differs is taken apart.
TEST_P(Gradient, SameBitsForAnyThreadsLayoutAndSubset) {
  if (const std::string why = too_slow(3e5); !why.empty()) GTEST_SKIP() << why;
  const Gradients want = run_with(inputs());
  EXPECT_EQ(want.faults, std::vector<std::string>()) << line();
  struct Run {
    int threads;
    Layout layout;
    GradientSet asked;
  };
  const bool even = seed_ % 2 == 0;
  const Run kRuns[] = {{2, Layout::kBhsd, problem_.asked},
                       {3, Layout::kTransposed, 1u | 16u},
                       {7, Layout::kPadded, 2u | 8u},
                       {0, Layout::kNegative, 4u},
                       {3, even ? Layout::kJunk : Layout::kExpanded, even ? 6u : 8u | 16u},
                       {0, even ? Layout::kMixed : Layout::kQkv, kAllGradients}};
  Guard guard = Guard::kStart;
  for (const Run& r : kRuns) {
    const GradientSet asked = here(r.asked);
    RunOptions options = planned();
    options.guard = guard = guard == Guard::kStart ? Guard::kEnd : Guard::kStart;
    options.threads = r.threads;
    options.layout = r.layout;
    const Gradients got = run_with(inputs(), options, asked);
    EXPECT_EQ(got.faults, std::vector<std::string>()) << line();
    const std::string text = difference(got, want, asked);
    if (text.empty()) continue;
    ADD_FAILURE() << text << "\n" << what_matters(want, options, asked) << "\n" << line();
    return;
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
  if (desc_.batch < 2) return;
  if (desc_.dropout_p > 0 && desc_.dropout_p < 1) return;  // its random numbers count the batch
  if (const std::string why = too_slow(3e5); !why.empty()) GTEST_SKIP() << why;
  const BackwardSlice a = slice_batch(desc_, inputs(), 0, desc_.batch / 2);
  const BackwardSlice b = slice_batch(desc_, inputs(), desc_.batch / 2, desc_.batch);
  GradientSet asked = 7u;
  if (desc_.attn_bias.given && desc_.attn_bias.dims[0] > 1) asked |= 8u;
  if (desc_.alibi_slopes_ndim == 2) asked |= 16u;
  const Gradients first = run(kernel_, a.desc, a.inputs, planned(), asked);
  const Gradients second = run(kernel_, b.desc, b.inputs, planned(), asked);
  Gradients whole = run_with(inputs(), planned(), asked), parts;
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
  if (const std::string why = too_slow(3e5); !why.empty()) GTEST_SKIP() << why;
  const BackwardInputs& poisoned = once_per_case([&] { return poison_hidden(desc_, inputs(), seed_); });
  RunOptions options = planned();
  options.threads = 1 + static_cast<int>(seed_ % 3);
  options.layout = seed_ % 2 == 0 ? Layout::kBshd : Layout::kTransposed;
  const Gradients clean = run_with(inputs());
  EXPECT_EQ(difference(run_with(poisoned, options), clean), "") << "poisoned where hidden\n" << line();
}

TEST_P(Gradient, VisibleIsVisible) {
  if (desc_.dropout_p >= 1) return;  // no weight is left that could show it
  if (const std::string why = too_slow(3e5); !why.empty()) GTEST_SKIP() << why;
  const std::vector<PokedBackward>& pokes = once_per_case([&] {
    std::vector<PokedBackward> list;
    const int count = products(desc_) > 1e6 ? 2 : kNumGradientPokes;  // large cases see some pokes, another case others
    for (int n = 0; n < count; ++n) {
      const auto poke = static_cast<GradientPoke>((seed_ + static_cast<uint64_t>(n)) % kNumGradientPokes);
      list.push_back(poke_visible(desc_, inputs(), poke, seed_));
    }
    return list;
  });
  const Gradients clean = run_with(inputs());
  for (const PokedBackward& poked : pokes) {
    if (!poked.done) continue;
    EXPECT_EQ(poke_mismatch(poked, clean, run_with(poked.inputs)), "") << poked.where << "\n" << line();
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Gradient, ::testing::ValuesIn(params()), param_name);

class GradientOfEachKernel : public ::testing::TestWithParam<const Kernel*> {};

// Values and incoming gradients are positive and several weights equal, so that a biased rounding of P or dS would show
// in the mean.
TEST_P(GradientOfEachKernel, DoesNotDrift) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t keys : {6, 40, 300}) {
      GradientProblem p;
      p.forward = problem_of("gradient_drift", dtype, 1, 8, 128, keys, 32);
      const AttentionDesc& d = p.forward.desc;
      if (const std::string why = GetParam()->why_not(d); !why.empty()) GTEST_SKIP() << why;
      BackwardInputs in = random_inputs(p);
      auto positive = [](Array& a) {
        for (int64_t n = 0; n < a.size(); ++n) a.set(n, std::fabs(a.at(n)));
      };
      positive(in.forward.value);
      positive(in.grad_out);
      Array& key = in.forward.key;
      for (int64_t n = 0; n < key.size(); ++n) key.set(n, n / (8 * 32) % 3 == 0 ? 1 : key.at(n));
      compute_forward(d, in);
      EXPECT_EQ(verdict(p, run(*GetParam(), d, in, planned()), expected(d, in), in), "")
          << problem_line(GetParam()->name, p);
    }
  }
}

TEST_P(GradientOfEachKernel, GivesTheSameBitsToCallersAtOnce) {
  GradientProblem p;
  p.forward = problem_of("gradient_callers", DType::kFloat32, 2, 4, 70, 130, 40);
  const AttentionDesc& d = p.forward.desc;
  if (const std::string why = GetParam()->why_not(d); !why.empty()) GTEST_SKIP() << why;
  const BackwardInputs in = random_inputs(p);
  RunOptions options;
  options.threads = 3;
  const Gradients want = run(*GetParam(), d, in, options);
  std::vector<std::string> differences(4);
  std::vector<std::thread> callers;
  for (std::string& text : differences) {
    callers.emplace_back([&] {
      for (int n = 0; n < 10 && text.empty(); ++n) text = difference(run(*GetParam(), d, in, options), want);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::string& text : differences) EXPECT_EQ(text, "");
}

TEST_P(GradientOfEachKernel, TakesStridesBeyond32Bits) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    GradientProblem p;
    p.forward = problem_of("gradient_far", dtype, 1, 1, 3, 3, 16);
    const AttentionDesc& d = p.forward.desc;
    if (const std::string why = GetParam()->why_not(d); !why.empty()) GTEST_SKIP() << why;
    const BackwardInputs in = random_inputs(p);
    const Gradients want = run(*GetParam(), d, in);
    const FarRows query(in.forward.query), key(in.forward.key), value(in.forward.value), out(in.out);
    const FarRows grad_out(in.grad_out), grad_query(want.query), grad_key(want.key), grad_value(want.value);
    for (const FarRows* rows : {&query, &key, &value, &out, &grad_out, &grad_query, &grad_key, &grad_value}) {
      if (!rows->tensor().data) GTEST_SKIP() << "this machine has no 200 GB of addresses to give";
    }
    for (const FarRows* rows : {&grad_query, &grad_key, &grad_value}) {
      for (int64_t i = 0; i < 3; ++i) std::memset(rows->row(i), 0xff, rows->row_bytes());
    }
    BackwardArgs args = dense_args(in);
    args.forward.query = query.tensor();
    args.forward.key = key.tensor();
    args.forward.value = value.tensor();
    args.forward.out = out.tensor();
    args.grad_out = grad_out.tensor();
    args.grad_query = grad_query.tensor();
    args.grad_key = grad_key.tensor();
    args.grad_value = grad_value.tensor();
    const Result<Plan> plan = polyhead::plan(d, {GetParam()->name, &executor(2)});
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const GuardedBytes workspace(plan->backward_workspace_bytes(), Guard::kEnd, 0xff);
    args.forward.workspace = workspace.data();
    args.forward.workspace_bytes = workspace.size();
    const Status status = plan->backward(args);
    ASSERT_TRUE(status.ok()) << status.message();
    auto same = [](const FarRows& got, const Array& dense, const char* name) {
      for (int64_t i = 0; i < 3; ++i) {
        EXPECT_EQ(std::memcmp(got.row(i), &dense.bytes[i * got.row_bytes()], got.row_bytes()), 0) << name << " " << i;
      }
    };
    same(grad_query, want.query, "query");
    same(grad_key, want.key, "key");
    same(grad_value, want.value, "value");
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, GradientOfEachKernel, ::testing::ValuesIn(kernels_to_test()),
                         [](const auto& each) { return std::string(each.param->name); });

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
