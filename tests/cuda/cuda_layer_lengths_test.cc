// Lengths that lie on the device are never trusted: what they say beyond a sequence is cut off, in attention, where padding
// is left out of products, and in steps of decoding; and neither are the numbers of a cache.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "device_under_test.h"
#include "layer_block.h"
#include "layer_on_cache.h"

namespace polyhead::testing {
namespace {

TEST(CudaLayer, CutsLengthsOff) {
  int num_run = 0;
  for (LayerProblem problem : layer_problems()) {
    const AttentionDesc& a = problem.desc.attention;
    if (!a.has_seqlens_q && !a.has_seqlens_k) continue;
    SCOPED_TRACE(problem.name);
    LayerInputs cut = random_inputs(problem), beyond = cut;
    const auto replace = [](Array& whole, Array& wild, int64_t steps) {
      for (int64_t n = 0; n < whole.size(); ++n) {
        if (n % 3 == 0)
          whole.set(n, static_cast<double>(steps)), wild.set(n, static_cast<double>(steps + 1000 * n + 1));
        if (n % 3 == 1) whole.set(n, 0), wild.set(n, static_cast<double>(-7 - n));
      }
    };
    replace(cut.seqlens_q, beyond.seqlens_q, problem.desc.seqlen_q);
    replace(cut.seqlens_k, beyond.seqlens_k, problem.desc.seqlen_k);
    const LayerRun on_cuda{.kernel = device_under_test.kernel, .layout_seed = problem.seed};
    EXPECT_EQ(difference(run(problem, beyond, on_cuda), run(problem, cut, on_cuda)), "");
    const LayerProblem steps = inference(problem);
    if (num_run == 0) {
      EXPECT_EQ(difference(run_steps(steps, beyond, on_cuda, false), run_steps(steps, cut, on_cuda, false)), "");
    }
    ++num_run;
  }
  EXPECT_GT(num_run, 2);
}

// Two sequences with room for two pages of 4 tokens, two new tokens each: of a pool of 6 pages, of which page 2 holds zeros.
struct OnCache {
  std::vector<int64_t> lengths_q = {2, 1}, lengths_k = {2, 6}, slots = {4, 5, 13, -1}, positions = {0, 1, 5, 7};
  std::vector<int64_t> table = {1, 0, 5, 3};
};

struct OutAndPool {
  Array out, key, value;
};

OutAndPool results_of(const OnCache& numbers, DType dtype) {
  LayerDesc d;
  d.batch = 2, d.seqlen_q = 2, d.seqlen_k = 8;
  d.num_heads = 4, d.num_heads_kv = 2;
  d.query_size = d.key_size = d.value_size = d.out_proj_size = 16;
  d.query_proj_size = d.key_proj_size = d.value_proj_size = 8;
  d.attention.has_seqlens_q = true, d.attention.causal = true, d.attention.align = Align::kBottomRight;
  d.dtype = dtype;
  d.cache = KvCacheDesc{.num_pages = 6,
                        .page_size = 4,
                        .num_heads_kv = 2,
                        .head_dim = 8,
                        .head_dim_v = 8,
                        .key_dtype = dtype,
                        .value_dtype = dtype,
                        .rotary_dim = 4};
  Random random(3);
  const auto drawn = [&](std::vector<int64_t> dims) { return random_array(random, dtype, std::move(dims), 0, 1); };
  const auto integers = [](const std::vector<int64_t>& values, std::vector<int64_t> dims) {
    Array a(DType::kInt64, std::move(dims));
    std::copy(values.begin(), values.end(), reinterpret_cast<int64_t*>(a.bytes.data()));
    return a;
  };
  OutAndPool results = {unwritten(Array(dtype, {2, 2, 16})), drawn({6, 4, 2, 8}), drawn({6, 4, 2, 8})};
  for (Array* pool : {&results.key, &results.value}) {
    for (int64_t n = 2 * 64; n < 3 * 64; ++n) pool->set(n, 0);
  }
  const Array x = drawn({2, 2, 16}), table = integers(numbers.table, {2, 2}), slots = integers(numbers.slots, {2, 2});
  const Array positions = integers(numbers.positions, {2, 2}), lengths_q = integers(numbers.lengths_q, {2});
  const Array lengths_k = integers(numbers.lengths_k, {2}), w = drawn({16, 32}), wk = drawn({16, 16}),
              wo = drawn({32, 16});
  const Array cos = random_array(random, DType::kFloat32, {8, 2}, 0, 1);
  const Result<Layer> made = layer(d, options_of(device_under_test.kernel, 1));
  EXPECT_TRUE(made.ok()) << made.status().message();
  LayerForwardArgs args;
  args.query = args.key = args.value = view(x);
  args.weights.query = view(w), args.weights.key = args.weights.value = view(wk), args.weights.out = view(wo);
  args.seqlens_q = view(lengths_q), args.seqlens_k = view(lengths_k);
  args.cache.page_table = view(table), args.cache.slots = view(slots), args.cache.positions = view(positions);
  args.cache.cos = args.cache.sin = view(cos);
  args.out = view(results.out);
  const GuardedBytes workspace(made->workspace_bytes(), Guard::kEnd, 0xff);
  args.workspace = workspace.data(), args.workspace_bytes = made->workspace_bytes();
  LentCall lent(device_under_test.kernel);
  lent.lend(&args);
  const std::unique_ptr<Loan> loan = new_loan(device_under_test.kernel);
  args.cache.pool.key = view(results.key), args.cache.pool.value = view(results.value);
  for (Tensor* t : {&args.cache.pool.key, &args.cache.pool.value}) loan->lend(*t, true);
  EXPECT_EQ(made->forward(args).message(), "");
  EXPECT_EQ(lent.finish(), "");
  EXPECT_EQ(loan->finish(), "");
  return results;
}

TEST(CudaLayer, TrustsNoNumberOfACache) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();
  const auto with = [](auto change) {
    OnCache numbers;
    change(numbers);
    return numbers;
  };
  // As they are given, and as they count.
  const std::pair<OnCache, OnCache> pairs[] = {{with([](OnCache& n) {
                                                  n.lengths_q = {99, kLeast};
                                                }),
                                                with([](OnCache& n) {
                                                  n.lengths_q = {2, 0};
                                                })},
                                               {with([](OnCache& n) {
                                                  n.lengths_k = {kMost, -1};
                                                }),
                                                with([](OnCache& n) {
                                                  n.lengths_k = {8, 0};
                                                })},
                                               {with([](OnCache& n) {
                                                  n.slots = {24, 5, kLeast, kMost};
                                                }),
                                                with([](OnCache& n) {
                                                  n.slots = {-1, 5, -1, -1};
                                                })},
                                               {with([](OnCache& n) {
                                                  n.positions = {kLeast, 8, kMost, 0};
                                                }),
                                                with([](OnCache& n) {
                                                  n.positions = {0, 7, 7, 0};
                                                })},
                                               {with([](OnCache& n) {
                                                  n.table = {kMost, 0, -1, 6};
                                                }),
                                                with([](OnCache& n) {
                                                  n.table = {2, 0, 2, 2};
                                                })}};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const OutAndPool plain = results_of({}, dtype);
    for (const auto& [wild, cut] : pairs) {
      const OutAndPool got = results_of(wild, dtype), want = results_of(cut, dtype);
      EXPECT_EQ(difference("out", got.out, want.out), "");
      EXPECT_EQ(difference("key", got.key, want.key), "");
      EXPECT_EQ(difference("value", got.value, want.value), "");
      EXPECT_NE(difference("out", want.out, plain.out), "");
    }
  }
}

}  // namespace
}  // namespace polyhead::testing
