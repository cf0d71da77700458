// Every kernel on every case: what the definition gives is computed once for all kernels. POLYHEAD_TEST_KERNEL=name tests
// that one alone, --gtest_filter=*/case that case.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "cases.h"
#include "core/philox.h"
#include "every_kernel.h"
#include "far_rows.h"
#include "poison.h"
#include "polyhead/kernels.h"
#include "testing/call.h"
#include "testing/judge.h"
#include "testing/problem_words.h"

namespace polyhead::testing {
namespace {

// What a case has in common for all kernels.
struct Case {
  const Problem& problem;
  const AttentionDesc& desc;
  std::vector<ForwardDraw> draws;
  Inputs in;  // of the first
  Inputs poisoned[2];
  std::vector<Poked> pokes;
  std::vector<Slice> halves;  // of the batch, poisoned; none if they are not the whole

  explicit Case(const Problem& p) : problem(p), desc(p.desc), in(random_inputs(p)) {
    if (memory_alone()) return;
    draws = forward_draws(p);
    for (uint64_t n : {0, 1}) poisoned[n] = poison_hidden(desc, in, p.seed + n);
    for (Poke poke : {Poke::kQuery, Poke::kKey, Poke::kValue, Poke::kBias}) {
      if (desc.dropout_p >= 1) break;  // O = 0 exactly
      Poked poked = poke_visible(desc, in, poke, p.seed);
      if (poked.done) pokes.push_back(std::move(poked));
    }
    if (desc.batch < 2) return;
    halves.push_back(slice_batch(desc, poisoned[0], 0, desc.batch / 2));
    halves.push_back(slice_batch(desc, poisoned[0], desc.batch / 2, desc.batch));
  }
};

class KernelOnCase {
 public:
  KernelOnCase(const Kernel& kernel, const Case& test_case)
      : kernel_(kernel), case_(test_case), clean_(run_with(case_.in, {})) {}

  void test() const {
    expect_none("writes what it should", clean_.faults.empty() ? "" : clean_.faults.front());
    if (!memory_alone()) matches_the_definition();
    same_bits_whatever_must_not_matter();
    same_bits_for_a_batch_in_two_parts();
    visible_is_visible();
  }

 private:
  // How a run differs from the clean one, on one thread, from dense operands.
  struct Change {
    RunOptions options;
    int poison = -1;  // which of the poisoned inputs
  };

  Outputs run_with(const Inputs& in, const RunOptions& options) const {
    set_running(line());
    return run(kernel_, case_.desc, in, options);
  }

  std::string line() const { return forward_command(kernel_.name, case_.problem); }

  void expect_none(const char* property, const std::string& trouble) const {
    EXPECT_EQ(trouble, "") << kernel_.name << ": " << property << "\n" << line();
  }

  void matches_the_definition() const {
    const Problem& problem = case_.problem;
    expect_none("matches the definition", mismatch(kernel_, problem, case_.draws, run_options(problem)));
  }

  // What differs from the clean run's; "" if nothing.
  std::string trouble(const Change& change) const {
    Outputs got = run_with(change.poison < 0 ? case_.in : case_.poisoned[change.poison], change.options);
    if (!got.faults.empty()) return got.faults.front();
    if (!change.options.logsumexp) got.logsumexp = clean_.logsumexp;
    return difference(got, clean_);
  }

  // Seven runs, each of which changes all that must not matter; the first that differs is taken apart.
  void same_bits_whatever_must_not_matter() const {
    constexpr Layout kLayouts[] = {Layout::kBhsd, Layout::kTransposed, Layout::kPadded, Layout::kNegative,
                                   Layout::kJunk, Layout::kExpanded,   Layout::kMixed};
    constexpr int kThreads[] = {2, 3, 7, 0};
    const uint64_t turn = case_.problem.seed;
    for (size_t n = 0; n < 7; ++n) {
      if (memory_alone() && n != turn % 7 && n != (turn + 3) % 7) continue;
      Change change;
      change.options.layout = kLayouts[n];
      change.options.layout_seed = turn + 1;
      change.options.threads = kThreads[(n + turn) % 4];
      change.options.guard = (n + turn / 4) % 2 == 0 ? Guard::kEnd : Guard::kStart;
      change.options.logsumexp = n != turn / 2 % 7;
      change.options.through_plan = memory_alone();
      // Poison is not the same everywhere, and so leaves fewer strides of 0.
      if (!memory_alone() && kLayouts[n] != Layout::kExpanded) change.poison = static_cast<int>(n % 2);
      const std::string text = trouble(change);
      if (!text.empty()) return expect_none("same bits whatever must not matter", text + what_matters(change));
    }
  }

  // Which of the changes makes other bits alone.
  std::string what_matters(const Change& all) const {
    std::string text = "\nwith " + std::to_string(all.options.threads) + " threads (0: tasks in reverse order), " +
                       layout_name(all.options.layout) + (all.poison < 0 ? "" : ", poisoned where hidden") +
                       (all.options.logsumexp ? "" : ", without logsumexp") + ". Alone matters:";
    Change threads, layout, guard, logsumexp, poison;
    threads.options.threads = all.options.threads;
    layout.options.layout = all.options.layout;
    layout.options.layout_seed = all.options.layout_seed;
    guard.options.guard = all.options.guard;
    logsumexp.options.logsumexp = all.options.logsumexp;
    poison.poison = all.poison;
    if (!trouble(threads).empty()) text += " threads";
    if (!trouble(layout).empty()) text += " layout";
    if (!trouble(guard).empty()) text += " guard";
    if (!trouble(logsumexp).empty()) text += " logsumexp";
    if (!trouble(poison).empty()) text += " what is hidden";
    return text;
  }

  void same_bits_for_a_batch_in_two_parts() const {
    if (case_.halves.empty()) return;
    RunOptions options;
    options.logsumexp = !case_.desc.packed;  // packed: [H, rows], whose parts do not follow each other
    options.threads = 2;
    set_running(line());
    const Slice &a = case_.halves[0], &b = case_.halves[1];
    const Outputs first = run(kernel_, a.desc, a.inputs, options);
    options.threads = 3;
    const Outputs second = run(kernel_, b.desc, b.inputs, options);
    for (const Outputs* half : {&first, &second}) {
      expect_none("writes what it should of a half of the batch", half->faults.empty() ? "" : half->faults.front());
    }
    Outputs whole = clean_, parts;
    parts.out = joined(first.out, second.out);
    parts.logsumexp = joined(first.logsumexp, second.logsumexp);
    parts.attn_weights = joined(first.attn_weights, second.attn_weights);
    parts.column_sums = joined(first.column_sums, second.column_sums);
    if (case_.desc.packed) {  // rows behind the end belong to no part
      whole.logsumexp = {};
      whole.out.dims[0] = parts.out.dims[0];
      whole.out.bytes.resize(parts.out.bytes.size());
    }
    expect_none("same bits for a batch in two parts, poisoned where hidden", difference(parts, whole));
  }

  void visible_is_visible() const {
    for (const Poked& poked : case_.pokes) {
      const std::string text = poke_mismatch(case_.desc, poked.inputs, clean_, run_with(poked.inputs, {}));
      expect_none("visible is visible", text.empty() ? "" : text + "\n" + poked.where);
    }
  }

  const Kernel& kernel_;
  const Case& case_;
  const Outputs clean_;
};

class Attention : public ::testing::TestWithParam<Problem> {};

TEST_P(Attention, OfEveryKernel) {
  const Case test_case(GetParam());
  for_every_kernel(test_case.desc, [&](const Kernel& kernel) { KernelOnCase(kernel, test_case).test(); });
}

INSTANTIATE_TEST_SUITE_P(Cases, Attention, ::testing::ValuesIn(cases()),
                         [](const auto& each) { return each.param.name; });

class EachKernel : public ::testing::TestWithParam<const Kernel*> {
 protected:
  // Whether this machine's kernel takes `problem`; else the test is skipped.
  static std::string why_not(const Problem& problem) { return GetParam()->why_not(problem.desc); }
};

// Values are positive and several weights equal, so that a biased rounding of P would show in the mean
// (arXiv:2510.04212).
TEST_P(EachKernel, DoesNotDrift) {
  bool tested = false;
  std::string why;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t keys : {6, 40, 300}) {
      const Problem p = problem_of("drift", dtype, 1, 16, 256, keys, 64);
      why = why_not(p);
      if (!why.empty()) continue;
      tested = true;
      Inputs in = random_inputs(p);
      for (int64_t n = 0; n < in.value.size(); ++n) in.value.set(n, std::fabs(in.value.at(n)));
      for (int64_t n = 0; n < in.key.size(); ++n) in.key.set(n, n / (16 * 64) % 3 == 0 ? 1 : in.key.at(n));
      const std::vector<ForwardDraw> draws = {{p.desc, in, expected(p.desc, in)}};
      EXPECT_EQ(mismatch(*GetParam(), p, draws), "") << forward_command(GetParam()->name, p);
    }
  }
  if (!tested) GTEST_SKIP() << why;
}

// Each block of keys then raises the maximum often, and leaves the weights before it below all numbers.
TEST_P(EachKernel, FollowsScoresThatRise) {
  void (*const options[])(AttentionDesc&) = {
      [](AttentionDesc&) {},
      [](AttentionDesc& d) { d.causal = true; },
      [](AttentionDesc& d) { d.window_left = 200, d.window_right = 30; },
      [](AttentionDesc& d) { d.has_sink_logits = true; },
      [](AttentionDesc& d) { d.return_weights = ReturnWeights::kPerHead; },
      [](AttentionDesc& d) { d.dropout_p = 0.2; },
  };
  bool tested = false;
  std::string why;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const auto& add_option : options) {
      Problem p = problem_of("rise", dtype, 1, 2, 140, 400, 24);
      add_option(p.desc);
      why = why_not(p);
      if (!why.empty()) continue;
      tested = true;
      p.desc.scale = 1;
      for (double rate : {0.25, 0.75, 5.0}) {
        Inputs in = random_inputs(p);
        for (int64_t n = 0; n < in.query.size(); n += 24) in.query.set(n, 1);
        for (int64_t n = 0; n < in.key.size(); n += 24) in.key.set(n, rate * static_cast<double>(n / (24 * 2)));
        const std::vector<ForwardDraw> draws = {{p.desc, in, expected(p.desc, in)}};
        EXPECT_EQ(mismatch(*GetParam(), p, draws), "") << forward_command(GetParam()->name, p) << ", rate " << rate;
      }
    }
  }
  if (!tested) GTEST_SKIP() << why;
}

// An element whose random bits are the threshold itself is kept.
TEST_P(EachKernel, DropsBelowTheThresholdOnly) {
  for (int64_t queries : {2, 70}) {
    Problem p = problem_of("threshold", DType::kFloat32, 1, 1, queries, 40, 16);
    p.desc.dropout_p = 0.5;
    if (const std::string why = why_not(p); !why.empty()) GTEST_SKIP() << why;
    Inputs in = random_inputs(p);
    for (int64_t j : {0, 5, 17, 39}) {
      const uint32_t bits = dropout_bits(in.dropout_seed, in.dropout_offset, 0, 1, j);
      for (uint32_t threshold : {bits, bits + 1}) {
        p.desc.dropout_p = threshold / 65536.0;
        const std::vector<ForwardDraw> draws = {{p.desc, in, expected(p.desc, in)}};
        EXPECT_EQ(mismatch(*GetParam(), p, draws), "") << forward_command(GetParam()->name, p);
      }
    }
  }
}

// They would make products with them a hundred times as slow on some CPUs.
TEST_P(EachKernel, GivesNoSubnormalWeights) {
  if (GetParam() == &kReference) GTEST_SKIP() << "the definition takes exp as it comes";
  for (int64_t queries : {1, 70}) {
    Problem p = problem_of("subnormal", DType::kFloat32, 1, 1, queries, 400, 1);
    p.desc.scale = 1;
    p.desc.return_weights = ReturnWeights::kPerHead;
    if (const std::string why = why_not(p); !why.empty()) GTEST_SKIP() << why;
    Inputs in = random_inputs(p);
    for (int64_t i = 0; i < queries; ++i) in.query.set(i, 1);
    for (int64_t j = 0; j < 400; ++j)
      in.key.set(j, j == 0 ? 0 : -84 - static_cast<double>(j) / 64);  // e^-87.34 = 2^-126
    const Array weights = run(*GetParam(), p.desc, in, {}).attn_weights;
    ASSERT_EQ(weights.size(), queries * 400);
    for (int64_t n = 0; n < weights.size(); ++n) {
      ASSERT_TRUE(weights.at(n) == 0 || weights.at(n) >= 0x1p-126) << n << ": " << weights.at(n);
    }
  }
}

TEST_P(EachKernel, GivesTheSameBitsToCallersAtOnce) {
  Problem p = problem_of("callers", DType::kFloat32, 2, 4, 70, 130, 40);
  if (!why_not(p).empty()) p.desc.dtype = DType::kBFloat16;
  if (const std::string why = why_not(p); !why.empty()) GTEST_SKIP() << why;
  const Inputs in = random_inputs(p);
  RunOptions options;
  options.threads = 3;
  const Outputs want = run(*GetParam(), p.desc, in, options);
  std::vector<std::string> differences(4);
  std::vector<std::thread> callers;
  for (std::string& text : differences) {
    callers.emplace_back([&] {
      for (int n = 0; n < 10 && text.empty(); ++n) text = difference(run(*GetParam(), p.desc, in, options), want);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::string& text : differences) EXPECT_EQ(text, "");
}

TEST_P(EachKernel, TakesStridesBeyond32Bits) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Problem p = problem_of("far", dtype, 1, 1, 3, 3, 16);
    if (const std::string why = why_not(p); !why.empty()) GTEST_SKIP() << why;
    const Inputs in = random_inputs(p);
    const Outputs want = run(*GetParam(), p.desc, in);
    const FarRows query(in.query), key(in.key), value(in.value), out(want.out);
    for (const FarRows* rows : {&query, &key, &value, &out}) {
      if (!rows->tensor().data) GTEST_SKIP() << "this machine has no 17 GB of addresses to give";
    }
    for (int64_t i = 0; i < 3; ++i) std::memset(out.row(i), 0xff, out.row_bytes());
    ForwardArgs args;
    args.query = query.tensor();
    args.key = key.tensor();
    args.value = value.tensor();
    args.out = out.tensor();
    const Result<Plan> plan = polyhead::plan(p.desc, {GetParam()->name, {.executor = &executor(2)}});
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const GuardedBytes workspace(plan->workspace_bytes(), Guard::kEnd, 0xff);
    args.workspace = workspace.data();
    args.workspace_bytes = workspace.size();
    const Status status = plan->forward(args);
    ASSERT_TRUE(status.ok()) << status.message();
    for (int64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(std::memcmp(out.row(i), &want.out.bytes[i * out.row_bytes()], out.row_bytes()), 0) << "row " << i;
    }
  }
}

// A step's weights sum to 1024 times the row's first one, above which its maximum is raised: a pass that finds a rounding more
// than the other raises it anew. Every query sees the same; the operands are exact in bfloat16.
TEST_P(EachKernel, ReturnsWeightsWhereASumIsAllThatAMaximumAllows) {
  constexpr int64_t kSize = 32, kLarge = 12;
  constexpr double kKey[] = {39.25, -81.0 / 2048, -1.0 / 8192};
  int tested = 0;
  constexpr std::pair<DType, int64_t> kOf[] = {{DType::kFloat32, 32}, {DType::kBFloat16, 32}, {DType::kBFloat16, 128}};
  for (const auto& [dtype, dim] : kOf) {
    Problem p = problem_of("sum", dtype, 1, 1, kSize, kSize, dim);
    p.desc.return_weights = ReturnWeights::kPerHead;
    if (!why_not(p).empty()) continue;
    ++tested;
    Inputs in = random_inputs(p);
    double score[kSize] = {}, sum = 0;
    const double root = std::sqrt(static_cast<double>(dim)), times = root / std::sqrt(32.0);
    for (int64_t n = 0; n < kSize * dim; ++n) {
      in.query.set(n, n % dim < 3);
      in.key.set(n, 0);
      in.value.set(n, 1);
    }
    for (int64_t d = 0; d < 3; ++d) {
      in.key.set(kLarge * dim + d, times * kKey[d]);
      score[kLarge] += times * kKey[d] / root;
    }
    for (int64_t k = kLarge + 1; k < kLarge + 4; ++k) {
      in.key.set(k * dim, -1024);
      score[k] = -1024 / root;
    }
    for (double s : score) sum += std::exp(s - score[kLarge]);
    const Outputs got = run(*GetParam(), p.desc, in);
    for (int64_t n = 0; n < kSize * kSize; ++n) {
      ASSERT_NEAR(got.attn_weights.at(n), std::exp(score[n % kSize] - score[kLarge]) / sum, 0.004)
          << "query " << n / kSize << " key " << n % kSize;
    }
  }
  if (tested == 0) GTEST_SKIP() << "takes neither float32 nor bfloat16";
}

INSTANTIATE_TEST_SUITE_P(Kernels, EachKernel, ::testing::ValuesIn(kernels_to_test()),
                         [](const auto& each) { return std::string(each.param->name); });

TEST(AttentionTest, TestsAKernel) {
  EXPECT_FALSE(kernels_to_test().empty()) << "no kernel of this build has the name in POLYHEAD_TEST_KERNEL";
}

TEST(AttentionTest, NamesEachCaseOnce) {
  std::vector<std::string> names;
  for (const Problem& problem : cases()) names.push_back(problem.name);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
}

}  // namespace
}  // namespace polyhead::testing
