// Every kernel on every case. POLYHEAD_TEST_KERNEL=name tests that one alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "cases.h"
#include "core/philox.h"
#include "far_rows.h"
#include "harness.h"
#include "judge.h"
#include "kernels_to_test.h"
#include "poison.h"
#include "polyhead/kernels.h"

namespace polyhead::testing {
namespace {

struct Param {
  const Kernel* kernel;
  const Problem* problem;
};

// Case by case, so that the kernels share what the definition gives.
std::vector<Param> params() {
  std::vector<Param> list;
  for (const Problem& problem : cases()) {
    for (const Kernel* kernel : kernels_to_test()) list.push_back({kernel, &problem});
  }
  return list;
}

std::string param_name(const ::testing::TestParamInfo<Param>& info) {
  return std::string(info.param.kernel->name) + "__" + info.param.problem->name;
}

class Attention : public ::testing::TestWithParam<Param> {
 protected:
  Attention() : kernel_(*GetParam().kernel), problem_(*GetParam().problem), desc_(problem_.desc) {
    set_running(line());
  }

  void SetUp() override {
    if (const std::string why = kernel_.why_not(desc_); !why.empty()) GTEST_SKIP() << why;
    in_ = random_inputs(problem_);
  }

  std::string line() const { return problem_line(kernel_.name, problem_); }

  Outputs run_with(const Inputs& in, const RunOptions& options = {}) const { return run(kernel_, desc_, in, options); }

  const Kernel& kernel_;
  const Problem& problem_;
  const AttentionDesc& desc_;
  Inputs in_;
};

TEST_P(Attention, MatchesTheDefinition) {
  static const Problem* last = nullptr;
  static Expected want;
  if (last != &problem_) want = expected(desc_, in_);
  last = &problem_;
  RunOptions options;
  options.layout = problem_.layout;
  options.layout_seed = problem_.seed;
  options.through_plan = true;
  EXPECT_EQ(mismatch(kernel_, problem_, in_, want, options), "") << line();
}

TEST_P(Attention, SameBitsForAnyThreadsAndLayout) {
  const Outputs want = run_with(in_);
  EXPECT_EQ(want.faults, std::vector<std::string>()) << line();
  auto same = [&](const RunOptions& options, const std::string& what) {
    Outputs got = run_with(in_, options);
    EXPECT_EQ(got.faults, std::vector<std::string>()) << what << "\n" << line();
    if (!options.logsumexp) got.logsumexp = want.logsumexp;
    EXPECT_EQ(difference(got, want), "") << what << "\n" << line();
  };
  RunOptions options;
  for (int threads : {2, 3, 7, 0}) {
    options.threads = threads;
    same(options, threads == 0 ? "tasks in reverse order" : std::to_string(threads) + " threads");
  }
  options = {};
  options.guard = Guard::kStart;
  for (Layout layout : {Layout::kBhsd, Layout::kTransposed, Layout::kPadded, Layout::kNegative, Layout::kJunk,
                        Layout::kExpanded, Layout::kMixed}) {
    options.layout = layout;
    options.guard = options.guard == Guard::kStart ? Guard::kEnd : Guard::kStart;
    same(options, layout_name(layout));
  }
  options.layout = Layout::kBshd;
  options.guard = Guard::kStart;
  options.logsumexp = false;
  same(options, "without logsumexp");
}

// Elements of the dims' outermost, all of `first` and then all of `second`.
Array joined(const Array& first, const Array& second) {
  if (!first.given()) return {};
  Array both = first;
  both.dims[0] += second.dims[0];
  both.bytes.insert(both.bytes.end(), second.bytes.begin(), second.bytes.end());
  return both;
}

TEST_P(Attention, SameBitsForABatchInTwoParts) {
  if (desc_.batch < 2) return;
  if (desc_.dropout_p > 0 && desc_.dropout_p < 1) return;  // its random numbers count the batch
  RunOptions options;
  options.logsumexp = !desc_.packed;  // packed: [H, rows], whose parts do not follow each other
  const Slice a = slice_batch(desc_, in_, 0, desc_.batch / 2);
  const Slice b = slice_batch(desc_, in_, desc_.batch / 2, desc_.batch);
  const Outputs first = run(kernel_, a.desc, a.inputs, options), second = run(kernel_, b.desc, b.inputs, options);
  Outputs whole = run_with(in_, options), parts;
  parts.out = joined(first.out, second.out);
  parts.logsumexp = joined(first.logsumexp, second.logsumexp);
  parts.weights = joined(first.weights, second.weights);
  parts.column_sums = joined(first.column_sums, second.column_sums);
  if (desc_.packed) {  // rows behind the end belong to no part
    whole.out.dims[0] = parts.out.dims[0];
    whole.out.bytes.resize(parts.out.bytes.size());
  }
  EXPECT_EQ(difference(parts, whole), "") << line();
}

TEST_P(Attention, HiddenIsHidden) {
  const Outputs clean = run_with(in_);
  for (int n = 0; n < 2; ++n) {
    RunOptions options;
    options.threads = n + 1;
    options.layout = n == 0 ? Layout::kBshd : Layout::kTransposed;
    const Inputs poisoned = poison_hidden(desc_, in_, problem_.seed + static_cast<uint64_t>(n));
    EXPECT_EQ(difference(run_with(poisoned, options), clean), "") << "poisoned where hidden\n" << line();
  }
}

TEST_P(Attention, VisibleIsVisible) {
  if (desc_.dropout_p >= 1) return;  // O = 0 exactly
  const Outputs clean = run_with(in_);
  for (Poke poke : {Poke::kQuery, Poke::kKey, Poke::kValue, Poke::kBias}) {
    const Poked poked = poke_visible(desc_, in_, poke, problem_.seed);
    if (!poked.done) continue;
    EXPECT_EQ(poke_mismatch(desc_, poked.inputs, clean, run_with(poked.inputs)), "") << poked.where << "\n" << line();
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Attention, ::testing::ValuesIn(params()), param_name);

class EachKernel : public ::testing::TestWithParam<const Kernel*> {
 protected:
  // Whether this machine's kernel takes `problem`; else the test is skipped.
  static std::string why_not(const Problem& problem) { return GetParam()->why_not(problem.desc); }
};

// Values are positive and several weights equal, so that a biased rounding of P would show in the mean
// (arXiv:2510.04212).
TEST_P(EachKernel, DoesNotDrift) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t keys : {6, 40, 300}) {
      const Problem p = problem_of("drift", dtype, 1, 16, 256, keys, 64);
      if (const std::string why = why_not(p); !why.empty()) GTEST_SKIP() << why;
      Inputs in = random_inputs(p);
      for (int64_t n = 0; n < in.value.size(); ++n) in.value.set(n, std::fabs(in.value.at(n)));
      for (int64_t n = 0; n < in.key.size(); ++n) in.key.set(n, n / (16 * 64) % 3 == 0 ? 1 : in.key.at(n));
      EXPECT_EQ(mismatch(run(*GetParam(), p.desc, in), expected(p.desc, in), p), "")
          << problem_line(GetParam()->name, p);
    }
  }
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
        EXPECT_EQ(mismatch(run(*GetParam(), p.desc, in), expected(p.desc, in), p), "")
            << problem_line(GetParam()->name, p);
      }
    }
  }
}

TEST_P(EachKernel, GivesTheSameBitsToCallersAtOnce) {
  const Problem p = problem_of("callers", DType::kFloat32, 2, 4, 70, 130, 40);
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
    const Result<Plan> plan = polyhead::plan(p.desc, {GetParam()->name, &executor(2)});
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
