// Extreme sizes of attention and products: a plan must refuse them with a sentence or make sense of them. Those that
// succeed and are little work run, through C++ and through C (size_fuzz.h).
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "kernels_to_test.h"
#include "polyhead/matrix_product.h"
#include "size_fuzz.h"
#include "through_c.h"

namespace polyhead::testing {
namespace {

TEST(MemorySize, StaysTooLarge) {
  constexpr int64_t kMost = PTRDIFF_MAX;
  EXPECT_TRUE(MemorySize(kMost).fits());
  EXPECT_EQ(MemorySize(kMost).value(), size_t{PTRDIFF_MAX});
  EXPECT_FALSE((MemorySize(kMost) + 1).fits());
  EXPECT_FALSE((MemorySize(kMost) * 2 + MemorySize(kMost) * 2).fits());
  EXPECT_FALSE((MemorySize(int64_t{1} << 32) * (int64_t{1} << 32)).fits());
  EXPECT_FALSE((MemorySize::too_large() + 0).fits());
  EXPECT_FALSE((MemorySize::too_large() + MemorySize::too_large()).fits());
  EXPECT_FALSE(MemorySize::too_large().rounded_up(64).fits());
  EXPECT_FALSE(MemorySize(kMost).rounded_up(64).fits());
  EXPECT_FALSE(MemorySize(-1).fits());
  EXPECT_FALSE(MemorySize(size_t{1} << 63).fits());
  EXPECT_EQ((MemorySize::too_large() * 0).value(), 0u);
  EXPECT_EQ((MemorySize(3) * 5 + 1).rounded_up(64).value(), 64u);
  EXPECT_LT(MemorySize(kMost), MemorySize::too_large());
  EXPECT_EQ(pieces(kMost, 16), kMost / 16 + 1);
  MemoryMap map;
  EXPECT_EQ(map.take({3, 5}, 4), 0u);
  EXPECT_EQ(map.take({int64_t{1} << 62, int64_t{1} << 62, 0}, 8), 64u);
  EXPECT_EQ(map.take({1}, 1), 64u);
  EXPECT_EQ(map.bytes(), 128u);
  EXPECT_TRUE(map.fits());
  map.take({int64_t{1} << 62, 2}, 1);
  EXPECT_FALSE(map.fits());
  map.take({1}, 1);
  EXPECT_FALSE(map.fits());
}

AttentionDesc random_desc(Random& random) {
  const auto chance = [&](int percent) { return random.integer(0, 99) < percent; };
  Sizes size(random);
  AttentionDesc d;
  d.batch = size();
  d.seqlen_q = size();
  d.seqlen_k = size();
  d.num_heads_kv = std::max<int64_t>(size(), 1);
  d.num_heads = d.num_heads_kv;
  if (chance(30)) __builtin_mul_overflow(d.num_heads_kv, size(), &d.num_heads);
  d.head_dim = size();
  d.head_dim_v = size();
  d.dtype = random_dtype(random);
  d.packed = chance(25);
  d.has_seqlens_q = !d.packed && chance(20);
  d.has_seqlens_k = !d.packed && chance(30);
  d.causal = chance(25);
  if (chance(15)) d.window_left = size();
  if (chance(15)) d.window_right = size();
  d.softcap = chance(15) ? 2 : 0;
  if (chance(25)) {
    d.query_offset = chance(50) ? size() : -size();
  } else {
    d.align = chance(50) ? Align::kTopLeft : Align::kBottomRight;
  }
  if (!d.packed && chance(20)) d.attn_mask = {true, DType::kBool, {1, 1, chance(50) ? d.seqlen_q : 1, d.seqlen_k}};
  if (!d.packed && chance(20)) {
    d.attn_bias = {true, DType::kFloat32, {1, chance(50) ? d.num_heads : 1, 1, chance(50) ? d.seqlen_k : 1}};
  }
  d.alibi_slopes_ndim = chance(15) ? 1 : 0;
  d.dropout_p = chance(15) ? 0.25 : 0;
  if (!d.packed && chance(15)) d.return_weights = chance(50) ? ReturnWeights::kPerHead : ReturnWeights::kMean;
  d.return_column_sums = !d.packed && chance(10);
  d.has_windows = !d.packed && chance(10);
  return d;
}

std::string words(int64_t n, const AttentionDesc& d) {
  return told(n, {{"B", d.batch},
                  {"Sq", d.seqlen_q},
                  {"Sk", d.seqlen_k},
                  {"H", d.num_heads},
                  {"G", d.num_heads_kv},
                  {"D", d.head_dim},
                  {"Dv", d.head_dim_v},
                  {"dtype", int64_t(d.dtype)},
                  {"packed", d.packed},
                  {"seqlens_q", d.has_seqlens_q},
                  {"seqlens_k", d.has_seqlens_k},
                  {"windows", d.has_windows}});
}

// The arrays of a call of attention.
class Arrays : public FuzzArrays {
 public:
  explicit Arrays(const AttentionDesc& d) : d_(d) {
    if (d.has_seqlens_q || d.has_seqlens_k) lengths_.resize(static_cast<size_t>(d.batch));
  }

  // All ones, or 0, 1, 1, ... behind each other; few, or as many as there are rows.
  Tensor lengths(int64_t limit) {
    for (auto& n : lengths_) n = std::min<int64_t>(limit, 1);
    return integers(lengths_, d_.batch);
  }
  Tensor boundaries(std::vector<int64_t>& to, int64_t limit) {
    to.resize(static_cast<size_t>(d_.batch) + 1);
    for (size_t b = 0; b < to.size(); ++b) to[b] = std::min<int64_t>(limit, static_cast<int64_t>(b));
    return integers(to, d_.batch + 1);
  }

  bool forward(ForwardArgs* args) {
    const int64_t B = d_.batch, Sq = d_.seqlen_q, Sk = d_.seqlen_k, H = d_.num_heads, G = d_.num_heads_kv;
    const DType sums = d_.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    bool made = true;
    if (d_.packed) {
      args->query = input(d_.dtype, {Sq, H, d_.head_dim});
      args->key = input(d_.dtype, {Sk, G, d_.head_dim});
      args->value = input(d_.dtype, {Sk, G, d_.head_dim_v});
      args->cu_seqlens_q = boundaries(cu_q_, Sq);
      args->cu_seqlens_k = boundaries(cu_k_, Sk);
      made = output(d_.dtype, {Sq, H, d_.head_dim_v}, &args->out) && output(sums, {H, Sq}, &args->logsumexp);
    } else {
      args->query = input(d_.dtype, {B, Sq, H, d_.head_dim});
      args->key = input(d_.dtype, {B, Sk, G, d_.head_dim});
      args->value = input(d_.dtype, {B, Sk, G, d_.head_dim_v});
      made = output(d_.dtype, {B, Sq, H, d_.head_dim_v}, &args->out) && output(sums, {B, H, Sq}, &args->logsumexp);
    }
    const auto broadcast = [](const BroadcastOperand& o) {
      return o.given ? input(o.dtype, {o.dims[0], o.dims[1], o.dims[2], o.dims[3]}) : Tensor();
    };
    args->attn_mask = broadcast(d_.attn_mask);
    args->attn_bias = broadcast(d_.attn_bias);
    if (d_.alibi_slopes_ndim == 1) args->alibi_slopes = input(DType::kFloat32, {H});
    if (d_.has_windows) args->window_lo = bound(0), args->window_hi = bound(1);
    if (d_.has_seqlens_q) args->seqlens_q = lengths(std::min(Sq, Sk));
    if (d_.has_seqlens_k) args->seqlens_k = lengths(std::min(Sq, Sk));
    if (d_.return_weights == ReturnWeights::kPerHead)
      made = made && output(d_.dtype, {B, H, Sq, Sk}, &args->attn_weights);
    if (d_.return_weights == ReturnWeights::kMean) made = made && output(d_.dtype, {B, Sq, Sk}, &args->attn_weights);
    if (d_.return_column_sums) made = made && output(sums, {B, H, Sk}, &args->column_sums);
    return made;
  }

  // Those gradients that are not too large; false if none.
  bool backward(const ForwardArgs& forward, BackwardArgs* args) {
    args->forward = forward;
    args->forward.attn_weights = args->forward.column_sums = {};
    args->grad_out = forward.out;
    args->grad_out.data = input(d_.dtype, {}).data;
    for (int64_t& stride : args->grad_out.strides) stride = 0;
    bool any = output_like(forward.query, &args->grad_query);
    any = output_like(forward.key, &args->grad_key) || any;
    any = output_like(forward.value, &args->grad_value) || any;
    if (d_.attn_bias.given) any = output_like(forward.attn_bias, &args->grad_attn_bias) || any;
    if (d_.alibi_slopes_ndim == 1) {
      any = output(DType::kFloat32, {d_.num_heads}, &args->grad_alibi_slopes) || any;
    }
    return any;
  }

 private:
  // The same for every query.
  Tensor bound(size_t which) {
    Tensor t = integers(window_, d_.seqlen_q);
    t.data = &window_[which], t.strides[0] = 0;
    return t;
  }
  static Tensor integers(const std::vector<int64_t>& from, int64_t count) {
    Tensor t = input(DType::kInt64, {count});
    t.data = const_cast<int64_t*>(from.data());
    t.strides[0] = 1;
    return t;
  }
  const AttentionDesc& d_;
  std::vector<int64_t> lengths_, cu_q_, cu_k_, window_ = {0, 1};
};

// Forward and backward of a plan, if they are little work.
template <class AnyPlan>
void run(const AnyPlan& plan, const AttentionDesc& d, Figures* figures) {
  const bool has_lengths = d.packed || d.has_seqlens_q || d.has_seqlens_k;
  if (has_lengths && d.batch > (1 << 16)) return;
  const int64_t lengths = d.packed ? std::min<int64_t>(d.batch, std::min(d.seqlen_q, d.seqlen_k)) : 0;
  const int64_t queries = d.packed ? lengths : d.seqlen_q, keys = d.packed || d.has_seqlens_k ? 1 : d.seqlen_k;
  const int64_t batch = d.packed ? 1 : d.batch, dims = std::max(d.head_dim, d.head_dim_v);
  Arrays arrays(d);
  ForwardArgs args;
  args.dropout_seed = 1;
  if (plan.workspace_bytes() > kMostBytes || !arrays.forward(&args)) return;
  // Rows are visited where they have no keys or dims, too.
  const auto at_least_1 = [](int64_t n) { return std::max<int64_t>(n, 1); };
  if (!little_work({batch, d.num_heads, queries, at_least_1(keys), at_least_1(dims)})) return;
  const GuardedBytes workspace(plan.workspace_bytes(), Guard::kEnd, 0xff);
  args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
  Status status = plan.forward(args);
  ASSERT_TRUE(status.ok()) << status.message();
  ++figures->forward;
  BackwardArgs back;
  if (plan.backward_workspace_bytes() > kMostBytes || !arrays.backward(args, &back)) return;
  if (!little_work({batch, d.num_heads, std::max(d.seqlen_q, d.seqlen_k), at_least_1(std::min(d.seqlen_q, d.seqlen_k)),
                    at_least_1(dims), 16})) {
    return;
  }
  const GuardedBytes more(plan.backward_workspace_bytes(), Guard::kEnd, 0xff);
  back.forward.workspace = more.data(), back.forward.workspace_bytes = more.size();
  status = plan.backward(back);
  ASSERT_TRUE(status.ok()) << status.message();
  ++figures->backward;
}

TEST(Sizes, NoPlanWrapsAndWhatItTakesRuns) {
  std::array<std::unique_ptr<Executor>, 3> pools;
  for (size_t i = 0; i < pools.size(); ++i) pools[i].reset(new_thread_pool(static_cast<int>(i * i) + 1));
  Figures figures("attention"), c_figures("attention through C");
  fuzz(1500, 1, [&](Random& random, int64_t n) {
    const AttentionDesc d = random_desc(random);
    Executor& pool = *pools[static_cast<size_t>(random.integer(0, 2))];
    SCOPED_TRACE(words(n, d));
    for (const Kernel* kernel : kernels_to_test()) {
      const Result<Plan> made = plan(d, {kernel->name, {.executor = &pool}});
      if (!kernel->why_not(d).empty() && !made.ok()) continue;  // it is not a matter of sizes alone
      ++figures.plans;
      if (!made.ok()) {
        ASSERT_NE(made.status().message(), "");
        ++figures.refused;
        continue;
      }
      // What a workspace holds at least: nothing that counts it has wrapped.
      ASSERT_LE(made->workspace_bytes(), size_t{PTRDIFF_MAX});
      run(*made, d, &figures);
      if (::testing::Test::HasFatalFailure()) return;
    }
    // The C interface says the same.
    const PlanThroughC through_c(d);
    const Result<Plan> made = plan(d);
    ASSERT_EQ(through_c.made.code(), made.status().code());
    ASSERT_EQ(through_c.made.message(), made.status().message());
    ++c_figures.plans;
    if (made.ok()) {
      EXPECT_EQ(through_c.workspace_bytes(), made->workspace_bytes());
      EXPECT_EQ(through_c.backward_workspace_bytes(), made->backward_workspace_bytes());
      run(through_c, d, &c_figures);
    } else {
      ++c_figures.refused;
    }
  });
  EXPECT_GT(figures.refused, 0);
  EXPECT_GT(figures.plans, 2 * figures.refused);
}

TEST(Sizes, WhatOnceWrappedIsRefused) {
  AttentionDesc packed;
  packed.packed = true;
  packed.seqlen_q = packed.seqlen_k = packed.head_dim_v = 1;
  packed.head_dim = int64_t{1} << 56;
  AttentionDesc long_keys;
  long_keys.dtype = DType::kFloat64;
  long_keys.seqlen_q = long_keys.head_dim = long_keys.head_dim_v = 1;
  long_keys.seqlen_k = 768614336404564651;
  for (const Kernel* kernel : kernels_to_test()) {
    for (const AttentionDesc& d : {packed, long_keys}) {
      // The reference stores no row of a head: it would only take 2^56 steps.
      if (!kernel->why_not(d).empty() || (d.packed && std::string(kernel->name) == "reference")) continue;
      const Result<Plan> made = plan(d, {.kernel = kernel->name});
      ASSERT_FALSE(made.ok()) << kernel->name << words(0, d);
      EXPECT_NE(made.status().message().find("workspace"), std::string::npos) << made.status().message();
      EXPECT_NE(made.status().message().find("is too large"), std::string::npos) << made.status().message();
    }
  }
}

TEST(Sizes, ProductsThatFitRun) {
  Figures figures("products");
  fuzz(1500, 2, [&](Random& random, int64_t n) {
    Sizes size(random);
    MatrixProductDesc d;
    d.m = size(), d.n = size(), d.k = size();
    d.dtype = random.integer(0, 1) == 0 ? DType::kFloat32 : DType::kBFloat16;
    SCOPED_TRACE(told(n, {{"m", d.m}, {"n", d.n}, {"k", d.k}}));
    for (const Kernel* kernel : kernels_to_test()) {
      const Result<MatrixProduct> made = matrix_product(d, {.kernel = kernel->name});
      ++figures.plans;
      if (!made.ok()) {
        ASSERT_NE(made.status().message(), "");
        ++figures.refused;
        continue;
      }
      if (made->workspace_bytes() > kMostBytes || !little_work({d.m, d.n, d.k})) continue;
      FuzzArrays arrays;
      MatrixProductArgs args;
      args.a = FuzzArrays::input(d.dtype, {d.m, d.k});
      args.b = FuzzArrays::input(d.dtype, {d.k, d.n});
      if (!arrays.output(d.dtype, {d.m, d.n}, &args.c)) continue;
      const GuardedBytes workspace(made->workspace_bytes(), Guard::kEnd, 0xff);
      args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
      const Status status = made->forward(args);
      ASSERT_TRUE(status.ok()) << status.message();
      ++figures.forward;
    }
  });
}

}  // namespace
}  // namespace polyhead::testing
