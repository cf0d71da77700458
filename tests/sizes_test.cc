// Extreme sizes: each field near 0, 2^31, 2^32, 2^62, their products near 2^63 and 2^64, with every option. A plan must
// refuse them with a sentence or make sense of them: those that succeed and are little work run, on operands of stride 0,
// in a workspace between pages that nobody may touch. More rounds: POLYHEAD_FUZZ_RUNS; others: POLYHEAD_FUZZ_SEED.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "core/memory_size.h"
#include "guard.h"
#include "kernels_to_test.h"
#include "polyhead/matrix_product.h"
#include "polyhead/polyhead.h"
#include "problem.h"

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

constexpr size_t kMostBytes = size_t{16} << 20;  // of an array or workspace that is made
constexpr int64_t kMostWork = int64_t{1} << 22;  // multiply-adds of a call that is run

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoll(text, nullptr, 10) : otherwise;
}

// A size that something may go wrong at; often a small one, so that other fields may be large.
int64_t size(Random& random) {
  if (random.integer(0, 9) < 6) return random.integer(0, 9) < 8 ? random.integer(1, 3) : random.integer(0, 70);
  static constexpr int kPowers[] = {16, 20, 24, 31, 32, 33, 40, 48, 52, 54, 55, 56, 57, 58, 59, 60, 61, 62};
  const int64_t power = int64_t{1} << kPowers[random.integer(0, 17)];
  switch (random.integer(0, 3)) {
    case 0: return power;
    case 1: return power + random.integer(-3, 3);
    case 2:
      return static_cast<int64_t>(UINT64_MAX / static_cast<uint64_t>(random.integer(3, 5000))) + random.integer(-1, 2);
    default: return power / random.integer(1, 100) + random.integer(0, 2);
  }
}

AttentionDesc random_desc(Random& random) {
  const auto chance = [&](int percent) { return random.integer(0, 99) < percent; };
  static constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
  AttentionDesc d;
  d.batch = size(random);
  d.seqlen_q = size(random);
  d.seqlen_k = size(random);
  d.num_heads_kv = size(random);
  d.num_heads = d.num_heads_kv;
  if (chance(30)) __builtin_mul_overflow(d.num_heads_kv, size(random), &d.num_heads);
  d.head_dim = size(random);
  d.head_dim_v = size(random);
  d.dtype = kDTypes[random.integer(0, 3)];
  d.packed = chance(25);
  d.has_seqlens_q = !d.packed && chance(20);
  d.has_seqlens_k = !d.packed && chance(30);
  d.causal = chance(25);
  if (chance(15)) d.window_left = size(random);
  if (chance(15)) d.window_right = size(random);
  d.softcap = chance(15) ? 2 : 0;
  if (chance(25)) {
    d.query_offset = chance(50) ? size(random) : -size(random);
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
  return d;
}

std::string words(const AttentionDesc& d) {
  std::string text;
  for (const int64_t n : {d.batch, d.seqlen_q, d.seqlen_k, d.num_heads, d.num_heads_kv, d.head_dim, d.head_dim_v,
                          int64_t(d.dtype), int64_t{d.packed}, int64_t{d.has_seqlens_q}, int64_t{d.has_seqlens_k}}) {
    text += ' ';
    text += std::to_string(n);
  }
  return "B Sq Sk H G D Dv dtype packed seqlens_q seqlens_k" + text;
}

// Arrays of a call: inputs are one element with strides 0, outputs lie row by row.
class Arrays {
 public:
  explicit Arrays(const AttentionDesc& d) : d_(d), lengths_(static_cast<size_t>(d.batch) + 1, 1) {}

  static Tensor input(DType dtype, std::initializer_list<int64_t> dims) {
    static double element = 0;  // in every floating-point dtype
    static uint8_t visible = 1;
    Tensor t;
    t.data = dtype == DType::kBool ? static_cast<void*>(&visible) : &element;
    t.dtype = dtype;
    for (const int64_t dim : dims) t.dims[t.ndim++] = dim;
    return t;
  }
  // False if it would be too large.
  bool output(DType dtype, std::initializer_list<int64_t> dims, Tensor* to) {
    MemorySize bytes = dtype_size_bytes(dtype);
    for (const int64_t dim : dims) bytes = bytes * dim;
    if (bytes > MemorySize(kMostBytes)) return false;
    made_.emplace_back(bytes.value(), Guard::kEnd, 0xff);
    Tensor t = input(dtype, dims);
    t.data = made_.back().data();
    int64_t stride = 1;
    for (int i = t.ndim - 1; i >= 0; --i) {
      t.strides[i] = stride;
      stride *= t.dims[i] > 0 ? t.dims[i] : 1;
    }
    *to = t;
    return true;
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
    if (d_.has_seqlens_q) args->seqlens_q = lengths(std::min(Sq, Sk));
    if (d_.has_seqlens_k) args->seqlens_k = lengths(std::min(Sq, Sk));
    if (d_.return_weights == ReturnWeights::kPerHead) made = made && output(d_.dtype, {B, H, Sq, Sk}, &args->weights);
    if (d_.return_weights == ReturnWeights::kMean) made = made && output(d_.dtype, {B, Sq, Sk}, &args->weights);
    if (d_.return_column_sums) made = made && output(sums, {B, H, Sk}, &args->column_sums);
    return made;
  }

  // Those gradients that are not too large; false if none.
  bool backward(const ForwardArgs& forward, BackwardArgs* args) {
    args->forward = forward;
    args->forward.weights = args->forward.column_sums = {};
    args->grad_out = forward.out;
    args->grad_out.data = input(d_.dtype, {}).data;
    for (int64_t& stride : args->grad_out.strides) stride = 0;
    const auto like = [&](const Tensor& t, Tensor* to) {
      if (t.ndim == 4) return output(t.dtype, {t.dims[0], t.dims[1], t.dims[2], t.dims[3]}, to);
      return output(t.dtype, {t.dims[0], t.dims[1], t.dims[2]}, to);
    };
    bool any = like(forward.query, &args->grad_query);
    any = like(forward.key, &args->grad_key) || any;
    any = like(forward.value, &args->grad_value) || any;
    if (d_.attn_bias.given) any = like(forward.attn_bias, &args->grad_attn_bias) || any;
    if (d_.alibi_slopes_ndim == 1) {
      any = output(DType::kFloat32, {d_.num_heads}, &args->grad_alibi_slopes) || any;
    }
    return any;
  }

 private:
  static Tensor integers(const std::vector<int64_t>& from, int64_t count) {
    Tensor t = input(DType::kInt64, {count});
    t.data = const_cast<int64_t*>(from.data());
    t.strides[0] = 1;
    return t;
  }
  const AttentionDesc& d_;
  std::vector<int64_t> lengths_, cu_q_, cu_k_;
  std::vector<GuardedBytes> made_;
};

bool little_work(std::initializer_list<int64_t> factors) {
  MemorySize work = 1;
  for (const int64_t factor : factors) work = work * std::max<int64_t>(factor, 1);
  return work <= MemorySize(kMostWork);
}

polyhead_attention_desc c_desc(const AttentionDesc& d) {
  polyhead_attention_desc c;
  EXPECT_EQ(polyhead_attention_desc_init(&c, sizeof c), POLYHEAD_OK);
  c.batch = d.batch, c.seqlen_q = d.seqlen_q, c.seqlen_k = d.seqlen_k, c.num_heads = d.num_heads;
  c.num_heads_kv = d.num_heads_kv, c.head_dim = d.head_dim, c.head_dim_v = d.head_dim_v;
  c.dtype = static_cast<int32_t>(d.dtype), c.packed = d.packed;
  c.has_seqlens_q = d.has_seqlens_q, c.has_seqlens_k = d.has_seqlens_k, c.causal = d.causal, c.softcap = d.softcap;
  c.window_left = d.window_left, c.window_right = d.window_right, c.align = static_cast<int32_t>(d.align);
  c.has_query_offset = d.query_offset.has_value(), c.query_offset = d.query_offset.value_or(0);
  c.alibi_slopes_ndim = d.alibi_slopes_ndim, c.dropout_p = d.dropout_p;
  c.return_weights = static_cast<int32_t>(d.return_weights), c.return_column_sums = d.return_column_sums;
  for (auto [from, to] : {std::pair(&d.attn_mask, &c.attn_mask), std::pair(&d.attn_bias, &c.attn_bias)}) {
    to->given = from->given;
    if (!from->given) continue;
    to->dtype = static_cast<int32_t>(from->dtype);
    std::copy(from->dims, from->dims + 4, to->dims);
  }
  return c;
}

struct Figures {
  int64_t plans = 0, refused = 0, forward = 0, backward = 0;
};

// Forward and backward of a plan, if they are little work.
void run(const Plan& plan, const AttentionDesc& d, Figures* figures) {
  if (d.batch > (1 << 16)) return;
  const int64_t lengths = d.packed ? std::min<int64_t>(d.batch, std::min(d.seqlen_q, d.seqlen_k)) : 0;
  const int64_t queries = d.packed ? lengths : d.seqlen_q, keys = d.packed ? 1 : d.has_seqlens_k ? 1 : d.seqlen_k;
  const int64_t batch = d.packed ? 1 : d.batch;
  // Without keys or heads, dims are only counted.
  const int64_t dims = std::max(d.head_dim, d.head_dim_v);
  Arrays arrays(d);
  ForwardArgs args;
  args.dropout_seed = 1;
  if (plan.workspace_bytes() > kMostBytes || !arrays.forward(&args)) return;
  if (!little_work({batch, d.num_heads, queries, keys, dims}) || !little_work({batch, d.num_heads, d.seqlen_q})) return;
  const GuardedBytes workspace(plan.workspace_bytes(), Guard::kEnd, 0xff);
  args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
  Status status = plan.forward(args);
  ASSERT_TRUE(status.ok()) << status.message();
  ++figures->forward;
  BackwardArgs back;
  if (plan.backward_workspace_bytes() > kMostBytes || !arrays.backward(args, &back)) return;
  if (!little_work({batch, d.num_heads, d.seqlen_q, d.seqlen_k, dims, 16})) return;
  const GuardedBytes more(plan.backward_workspace_bytes(), Guard::kEnd, 0xff);
  back.forward.workspace = more.data(), back.forward.workspace_bytes = more.size();
  status = plan.backward(back);
  ASSERT_TRUE(status.ok()) << status.message();
  ++figures->backward;
}

TEST(Sizes, NoPlanWrapsAndWhatItTakesRuns) {
  const int64_t runs = setting("POLYHEAD_FUZZ_RUNS", 3000), seed = setting("POLYHEAD_FUZZ_SEED", 1);
  std::array<std::unique_ptr<Executor>, 3> pools;
  for (size_t i = 0; i < pools.size(); ++i) pools[i].reset(new_thread_pool(static_cast<int>(i * i) + 1));
  Figures figures;
  for (int64_t n = setting("POLYHEAD_FUZZ_FIRST", 0), end = n + runs; n < end; ++n) {
    Random random(static_cast<uint64_t>(seed) * 1000003 + static_cast<uint64_t>(n));
    const AttentionDesc d = random_desc(random);
    Executor& pool = *pools[static_cast<size_t>(random.integer(0, 2))];
    SCOPED_TRACE("POLYHEAD_FUZZ_SEED=" + std::to_string(seed) + " POLYHEAD_FUZZ_FIRST=" + std::to_string(n) + ": " +
                 words(d));
    for (const Kernel* kernel : kernels_to_test()) {
      const Result<Plan> made = plan(d, {kernel->name, {.executor = &pool}});
      ++figures.plans;
      if (!made.ok()) {
        ASSERT_NE(made.status().message(), "");
        ++figures.refused;
        continue;
      }
      // What a workspace holds at least: nothing that counts it has wrapped.
      ASSERT_LE(made->workspace_bytes(), size_t{PTRDIFF_MAX});
      run(*made, d, &figures);
      if (HasFatalFailure()) return;
    }
    // The C interface says the same.
    polyhead_plan_options options;
    ASSERT_EQ(polyhead_plan_options_init(&options, sizeof options), POLYHEAD_OK);
    options.kernel = "reference";
    const polyhead_attention_desc c = c_desc(d);
    polyhead_attention_plan* by_c = nullptr;
    const polyhead_status status = polyhead_attention_plan_create(&c, &options, &by_c);
    const Result<Plan> by_cc = plan(d, {.kernel = "reference"});
    ASSERT_EQ(status, static_cast<polyhead_status>(by_cc.status().code()));
    if (by_cc.ok()) {
      EXPECT_EQ(polyhead_attention_plan_workspace_bytes(by_c), by_cc->workspace_bytes());
      EXPECT_EQ(polyhead_attention_plan_backward_workspace_bytes(by_c), by_cc->backward_workspace_bytes());
    } else {
      EXPECT_EQ(polyhead_last_error(), by_cc.status().message());
    }
    polyhead_attention_plan_destroy(by_c);
  }
  std::printf("%lld plans, %lld refused, %lld forward and %lld backward calls\n", static_cast<long long>(figures.plans),
              static_cast<long long>(figures.refused), static_cast<long long>(figures.forward),
              static_cast<long long>(figures.backward));
  EXPECT_GT(figures.refused, 0);
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
      ASSERT_FALSE(made.ok()) << kernel->name << words(d);
      EXPECT_NE(made.status().message().find("workspace"), std::string::npos) << made.status().message();
      EXPECT_NE(made.status().message().find("is too large"), std::string::npos) << made.status().message();
    }
  }
}

TEST(Sizes, ProductsThatFitRun) {
  const int64_t runs = setting("POLYHEAD_FUZZ_RUNS", 3000), seed = setting("POLYHEAD_FUZZ_SEED", 1);
  int64_t ran = 0, refused = 0;
  for (int64_t n = setting("POLYHEAD_FUZZ_FIRST", 0), end = n + runs; n < end; ++n) {
    Random random(static_cast<uint64_t>(seed) * 1000033 + static_cast<uint64_t>(n));
    MatrixProductDesc d;
    d.m = size(random), d.n = size(random), d.k = size(random);
    d.dtype = random.integer(0, 1) == 0 ? DType::kFloat32 : DType::kBFloat16;
    SCOPED_TRACE("POLYHEAD_FUZZ_FIRST=" + std::to_string(n) + ": m n k " + std::to_string(d.m) + " " +
                 std::to_string(d.n) + " " + std::to_string(d.k));
    for (const Kernel* kernel : kernels_to_test()) {
      const Result<MatrixProduct> made = matrix_product(d, {.kernel = kernel->name});
      if (!made.ok()) {
        ASSERT_NE(made.status().message(), "");
        ++refused;
        continue;
      }
      if (made->workspace_bytes() > kMostBytes || !little_work({d.m, d.n, d.k})) continue;
      AttentionDesc none;
      Arrays arrays(none);
      MatrixProductArgs args;
      args.a = Arrays::input(d.dtype, {d.m, d.k});
      args.b = Arrays::input(d.dtype, {d.k, d.n});
      if (!arrays.output(d.dtype, {d.m, d.n}, &args.c)) continue;
      const GuardedBytes workspace(made->workspace_bytes(), Guard::kEnd, 0xff);
      args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
      const Status status = made->forward(args);
      ASSERT_TRUE(status.ok()) << status.message();
      ++ran;
    }
  }
  std::printf("%lld products refused, %lld run\n", static_cast<long long>(refused), static_cast<long long>(ran));
}

}  // namespace
}  // namespace polyhead::testing
