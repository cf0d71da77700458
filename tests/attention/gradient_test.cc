// The gradients of every kernel on every case: what the definition gives is computed once for all kernels.
// POLYHEAD_TEST_KERNEL=name tests that one alone, --gtest_filter=*/case that case.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "every_kernel.h"
#include "far_rows.h"
#include "gradient_cases.h"
#include "gradient_poison.h"
#include "testing/definition.h"
#include "testing/judge.h"
#include "testing/problem_words.h"

namespace polyhead::testing {

namespace {

// Through the plan, which checks the arguments and computes problems of which some size is 0.
RunOptions planned() {
  RunOptions options;
  options.through_plan = true;
  return options;
}

// What a case has in common for all kernels.
struct GradientCase {
  const Problem& problem;
  const AttentionDesc& desc;
  std::vector<BackwardDraw> draws;
  BackwardInputs in;  // of the first
  BackwardInputs poisoned;
  std::vector<PokedBackward> pokes;
  std::vector<BackwardSlice> halves;  // of the batch, poisoned; none if they are not the whole

  explicit GradientCase(const Problem& p)
      : problem(p),
        desc(p.desc),
        draws(memory_alone() ? std::vector<BackwardDraw>() : backward_draws(p)),
        in(draws.empty() ? random_backward_inputs(p) : draws.front().in) {
    if (memory_alone()) return;
    const uint64_t seed = p.seed;
    poisoned = poison_hidden(desc, in, seed);
    // Large cases see some pokes, another case others.
    const int num_pokes = desc.dropout_p >= 1 ? 0 : products(desc) > 1e6 ? 2 : kNumGradientPokes;
    for (int n = 0; n < num_pokes; ++n) {
      const auto poke = static_cast<GradientPoke>((seed + static_cast<uint64_t>(n)) % kNumGradientPokes);
      PokedBackward poked = poke_visible(desc, in, poke, seed);
      if (poked.done) pokes.push_back(std::move(poked));
    }
    if (desc.batch < 2) return;
    halves.push_back(slice_batch(desc, poisoned, 0, desc.batch / 2));
    halves.push_back(slice_batch(desc, poisoned, desc.batch / 2, desc.batch));
  }
};

class KernelOnCase {
 public:
  KernelOnCase(const Kernel& kernel, const GradientCase& test_case)
      : kernel_(kernel), case_(test_case), desc_(case_.desc), clean_(run_with(case_.in, planned())) {}

  void test() const {
    expect_none("writes what it should", clean_.faults.empty() ? "" : clean_.faults.front());
    if (!memory_alone()) matches_the_definition();
    if (slow()) {
      return left_out().add("bits and poison of the reference, which is slow, on problems of more than 3e5 products");
    }
    same_bits_whatever_must_not_matter();
    same_bits_for_a_batch_in_two_parts();
    visible_is_visible();
  }

 private:
  // How a run differs from the clean one, of all gradients on one thread, from dense operands.
  struct Change {
    RunOptions options = planned();
    GradientSet asked = kAllGradients;
    bool poison = false;
  };

  // Naive loops take their time.
  bool slow() const { return &kernel_ == &kReference && products(desc_) > 3e5; }

  Gradients run_with(const BackwardInputs& in, const RunOptions& options, GradientSet asked = kAllGradients) const {
    set_running(line());
    return run(kernel_, desc_, in, options, asked);
  }

  std::string line() const { return backward_command(kernel_.name, case_.problem); }

  void expect_none(const char* property, const std::string& trouble) const {
    EXPECT_EQ(trouble, "") << kernel_.name << ": " << property << "\n" << line();
  }

  void matches_the_definition() const {
    if (&kernel_ == &kReference && products(desc_) > 1e6) {
      return left_out().add(
          "the reference against the definition, which is slow, on problems of more than 1e6 products");
    }
    Problem all = case_.problem;  // what else is asked for changes nothing: same_bits_...
    all.needs = kAllGradients;
    expect_none("matches the definition", mismatch(kernel_, all, case_.draws, run_options(all)));
  }

  // Of a set, the gradients of inputs that the problem has; query's if there is none.
  GradientSet here(GradientSet asked) const {
    const GradientSet inputs = gradients_there(desc_);
    return (asked & inputs) == 0 ? 1u : asked & inputs;
  }

  // What differs from the clean run's; "" if nothing.
  std::string trouble(const Change& change) const {
    const Gradients got = run_with(change.poison ? case_.poisoned : case_.in, change.options, change.asked);
    return got.faults.empty() ? difference(got, clean_, change.asked) : got.faults.front();
  }

  // Six runs, each of which changes all that must not matter; the first that differs is taken apart.
  void same_bits_whatever_must_not_matter() const {
    const uint64_t turn = case_.problem.seed;
    const bool even = turn % 2 == 0;
    struct Run {
      int threads;
      Layout layout;
      GradientSet asked;
    };
    const Run kRuns[] = {{2, Layout::kBshd, case_.problem.needs},
                         {3, Layout::kTransposed, 1u | 16u | 32u},
                         {7, Layout::kPadded, 2u | 8u},
                         {0, Layout::kNegative, 4u},
                         {3, even ? Layout::kJunk : Layout::kExpanded, even ? 6u : 8u | 16u | 32u},
                         {0, even ? Layout::kMixed : Layout::kQkv, kAllGradients}};
    for (size_t n = 0; n < 6; ++n) {
      if (memory_alone() && n != turn % 5) continue;
      Change change;
      change.options.threads = kRuns[n].threads;
      change.options.layout = kRuns[n].layout;
      change.options.guard = n % 2 == 0 ? Guard::kEnd : Guard::kStart;
      change.asked = here(kRuns[n].asked);
      // All gradients are asked for in the last; poison is not the same everywhere, and so leaves fewer strides of 0.
      change.poison = !memory_alone() && kRuns[n].layout != Layout::kExpanded && (n % 2 == 0 || n == 5);
      const std::string text = trouble(change);
      if (!text.empty()) return expect_none("same bits whatever must not matter", text + what_matters(change));
    }
  }

  // Which of the changes makes other bits alone.
  std::string what_matters(const Change& all) const {
    std::string text = "\nwith " + std::to_string(all.options.threads) + " threads (0: tasks in reverse order), " +
                       layout_name(all.options.layout) + ", gradients " + std::to_string(all.asked) +
                       (all.poison ? ", poisoned where hidden" : "") + ". Alone matters:";
    Change threads, layout, guard, asked, poison;
    threads.options.threads = all.options.threads;
    layout.options.layout = all.options.layout;
    guard.options.guard = all.options.guard;
    asked.asked = all.asked;
    poison.poison = all.poison;
    if (!trouble(threads).empty()) text += " threads";
    if (!trouble(layout).empty()) text += " layout";
    if (!trouble(guard).empty()) text += " guard";
    if (!trouble(asked).empty()) text += " what is asked for";
    if (!trouble(poison).empty()) text += " what is hidden";
    return text;
  }

  void same_bits_for_a_batch_in_two_parts() const {
    if (case_.halves.empty()) return;
    GradientSet asked = 7u;
    if (desc_.attn_bias.given && desc_.attn_bias.dims[0] > 1) asked |= 8u;
    if (desc_.alibi_slopes_ndim == 2) asked |= 16u;
    set_running(line());
    RunOptions options = planned();
    const BackwardSlice &a = case_.halves[0], &b = case_.halves[1];
    options.threads = 2;
    const Gradients first = run(kernel_, a.desc, a.inputs, options, asked);
    options.threads = 3;
    const Gradients second = run(kernel_, b.desc, b.inputs, options, asked);
    for (const Gradients* half : {&first, &second}) {
      expect_none("writes what it should of a half of the batch", half->faults.empty() ? "" : half->faults.front());
    }
    Gradients whole = clean_, parts;
    for (const GradientName& name : kGradients) {
      Array &w = whole.*name.gradient, &p = parts.*name.gradient;
      p = joined(first.*name.gradient, second.*name.gradient);
      if (!desc_.packed || !p.given()) continue;
      w.dims[0] = p.dims[0];  // rows behind the end belong to no part
      w.bytes.resize(p.bytes.size());
    }
    expect_none("same bits for a batch in two parts, poisoned where hidden", difference(parts, whole, asked));
  }

  void visible_is_visible() const {
    for (const PokedBackward& poked : case_.pokes) {
      const std::string text = poke_mismatch(poked, clean_, run_with(poked.inputs, planned()));
      expect_none("visible is visible", text.empty() ? "" : text + "\n" + poked.where);
    }
  }

  const Kernel& kernel_;
  const GradientCase& case_;
  const AttentionDesc& desc_;
  const Gradients clean_;
};

class Gradient : public ::testing::TestWithParam<Problem> {};

TEST_P(Gradient, OfEveryKernel) {
  const GradientCase test_case(GetParam());
  for_every_kernel(test_case.desc, [&](const Kernel& kernel) { KernelOnCase(kernel, test_case).test(); });
}

INSTANTIATE_TEST_SUITE_P(Cases, Gradient, ::testing::ValuesIn(gradient_cases()),
                         [](const auto& each) { return each.param.name; });

class GradientOfEachKernel : public ::testing::TestWithParam<const Kernel*> {};

// Values and incoming gradients are positive and several weights equal, so that a biased rounding of P or dS would show
// in the mean.
TEST_P(GradientOfEachKernel, DoesNotDrift) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t keys : {6, 40, 300}) {
      Problem p;
      p = problem_of("gradient_drift", dtype, 1, 8, 128, keys, 32);
      const AttentionDesc& d = p.desc;
      if (const std::string why = GetParam()->why_not(d); !why.empty()) GTEST_SKIP() << why;
      BackwardInputs in = random_backward_inputs(p);
      auto positive = [](Array& a) {
        for (int64_t n = 0; n < a.size(); ++n) a.set(n, std::fabs(a.at(n)));
      };
      positive(in.forward.value);
      positive(in.grad_out);
      Array& key = in.forward.key;
      for (int64_t n = 0; n < key.size(); ++n) key.set(n, n / (8 * 32) % 3 == 0 ? 1 : key.at(n));
      compute_forward(d, in);
      const std::vector<BackwardDraw> draws = {{d, in, expected(d, in)}};
      EXPECT_EQ(mismatch(*GetParam(), p, draws, planned()), "") << backward_command(GetParam()->name, p);
    }
  }
}

TEST_P(GradientOfEachKernel, GivesTheSameBitsToCallersAtOnce) {
  Problem p;
  p = problem_of("gradient_callers", DType::kFloat32, 2, 4, 70, 130, 40);
  const AttentionDesc& d = p.desc;
  if (const std::string why = GetParam()->why_not(d); !why.empty()) GTEST_SKIP() << why;
  const BackwardInputs in = random_backward_inputs(p);
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
    Problem p;
    p = problem_of("gradient_far", dtype, 1, 1, 3, 3, 16);
    const AttentionDesc& d = p.desc;
    if (const std::string why = GetParam()->why_not(d); !why.empty()) GTEST_SKIP() << why;
    const BackwardInputs in = random_backward_inputs(p);
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
    const Result<Plan> plan = polyhead::plan(d, {GetParam()->name, {.executor = &executor(2)}});
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
  for (const Problem& problem : gradient_cases()) names.push_back(problem.name);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
}

}  // namespace
}  // namespace polyhead::testing
