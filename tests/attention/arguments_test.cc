// What Plan::forward refuses, in which words, and what it does at the edges. Results: attention_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "core/dtype.h"
#include "count_allocations.h"
#include "small_call.h"

namespace polyhead {
namespace {

struct BadCall {
  void (*plan)(AttentionDesc& desc);
  void (*change)(ForwardArgs& args);
  std::string message;
};

void as_it_is(AttentionDesc&) {}
void with_all(AttentionDesc& d) {
  d.seqlen_q = 5;
  d.causal = d.has_seqlens_q = d.has_seqlens_k = d.return_column_sums = true;
  d.has_query_offsets = true;
  d.attn_mask = operand(DType::kBool, 2, 1, 5, 5);
  d.attn_bias = operand(DType::kFloat16, 1, 4, 5, 1);
  d.alibi_slopes_ndim = 2;
  d.has_sink_logits = true;
  d.return_weights = ReturnWeights::kPerHead;
}
void with_lengths(AttentionDesc& d) { d.causal = d.has_seqlens_q = d.has_seqlens_k = true; }
void packed(AttentionDesc& d) { d.packed = true; }
void packed_causal(AttentionDesc& d) { d.packed = d.causal = true; }
void dropping(AttentionDesc& d) { d.dropout_p = 0.5; }
void without_softmax(AttentionDesc& d) { d.normalizer = Normalizer::kNone; }

const BadCall kBadCalls[] = {
    {dropping, [](auto& a) { a.dropout_seed.reset(); }, "dropout_seed is not given, must be where dropout_p is 0.5"},
    {as_it_is, [](auto& a) { a.query = {}; }, "query is missing"},
    {as_it_is, [](auto& a) { a.value.ndim = -3; }, "value is missing"},
    {as_it_is, [](auto& a) { a.out = {}; }, "out is missing"},
    {as_it_is, [](auto& a) { a.query.data = nullptr; }, "query is null, has 192 elements"},
    {as_it_is, [](auto& a) { a.out.data = nullptr; }, "out is null, has 144 elements"},
    {as_it_is, [](auto& a) { a.key.dtype = DType::kFloat16; }, "key is float16, expected float32"},
    {as_it_is, [](auto& a) { a.key.dtype = DType{-9}; }, "key is an unknown dtype, expected float32"},
    {as_it_is, [](auto& a) { a.logsumexp.dtype = DType::kFloat64; }, "logsumexp is float64, expected float32"},
    {as_it_is, [](auto& a) { a.value.device = Device::kCuda; }, "value is not on the CPU, where this call computes"},
    {as_it_is, [](auto& a) { a.query.ndim = 3; },
     "query has 3 dims, expected 4: [batch, seqlen_q, num_heads, head_dim]"},
    {as_it_is, [](auto& a) { a.logsumexp.ndim = 1000; },
     "logsumexp has 1000 dims, expected 3: [batch, num_heads, seqlen_q]"},
    {as_it_is, [](auto& a) { a.query.dims[0] = 3; }, "query dim 0 is 3, expected batch 2"},
    {as_it_is, [](auto& a) { a.key.dims[1] = 6; }, "key dim 1 is 6, expected seqlen_k 5"},
    {as_it_is, [](auto& a) { a.value.dims[1] = 4; }, "value dim 1 is 4, expected seqlen_k 5"},
    {as_it_is, [](auto& a) { a.value.dims[2] = 4; }, "value dim 2 is 4, expected num_heads_kv 2"},
    {as_it_is, [](auto& a) { a.out.dims[3] = 8; }, "out dim 3 is 8, expected head_dim_v 6"},
    {as_it_is, [](auto& a) { a.out.dims[3] = -6; }, "out dim 3 is -6, expected head_dim_v 6"},
    {as_it_is, [](auto& a) { a.query.data = static_cast<char*>(a.query.data) + 2; },
     "query is not aligned to its elements of 4 bytes"},
    {as_it_is, [](auto& a) { a.key.strides[1] = kMax; }, "key reaches beyond the address space, by its strides"},
    {as_it_is, [](auto& a) { a.key.strides[1] = -kMax / 64; }, "key reaches beyond the address space, by its strides"},
    {as_it_is, [](auto& a) { a.out.strides[0] = kMax; }, "out reaches beyond the address space, by its strides"},
    {as_it_is, [](auto& a) { a.out.strides[3] = -1; }, "out has stride -1 in dim 3, an output's must not be negative"},
    {as_it_is, [](auto& a) { a.out.strides[2] = 0; }, "out overlaps itself: two indices name one element"},
    {as_it_is, [](auto& a) { a.out.strides[2] = 5; }, "out overlaps itself: two indices name one element"},
    {as_it_is, [](auto& a) { a.logsumexp.strides[1] = 2; }, "logsumexp overlaps itself: two indices name one element"},
    {as_it_is, [](auto& a) { a.out.data = a.query.data; }, "out overlaps query"},
    {as_it_is, [](auto& a) { a.query.data = static_cast<float*>(a.out.data) + 143; }, "out overlaps query"},
    {as_it_is, [](auto& a) { a.logsumexp.data = a.key.data; }, "logsumexp overlaps key"},
    {as_it_is, [](auto& a) { a.logsumexp.data = a.out.data; }, "logsumexp overlaps out"},
    {as_it_is, [](auto& a) { a.attn_mask = a.query; }, "attn_mask is given, but the plan was made without"},
    {as_it_is, [](auto& a) { a.attn_bias = a.query; }, "attn_bias is given, but the plan was made without"},
    {as_it_is, [](auto& a) { a.alibi_slopes = a.query; }, "alibi_slopes is given, but the plan was made without"},
    {as_it_is, [](auto& a) { a.seqlens_q = a.query; }, "seqlens_q is given, but the plan was made without"},
    {as_it_is, [](auto& a) { a.seqlens_k = a.query; }, "seqlens_k is given, but the plan was made without"},
    {as_it_is, [](auto& a) { a.cu_seqlens_q = a.query; }, "cu_seqlens_q is given, but the plan was made without"},
    {as_it_is, [](auto& a) { a.cu_seqlens_k = a.query; }, "cu_seqlens_k is given, but the plan was made without"},
    {as_it_is, [](auto& a) { a.query_offsets = a.query; }, "query_offsets is given, but the plan was made without"},
    {as_it_is, [](auto& a) { a.attn_weights = a.out; }, "attn_weights is given, but the plan was made without"},
    {as_it_is, [](auto& a) { a.column_sums = a.out; }, "column_sums is given, but the plan was made without"},
    {with_all, [](auto& a) { a.attn_mask = {}; }, "attn_mask is missing"},
    {with_all, [](auto& a) { a.attn_mask.dtype = DType::kFloat32; }, "attn_mask is float32, expected bool"},
    {with_all, [](auto& a) { a.attn_mask.ndim = 2; },
     "attn_mask has 2 dims, expected 4: [batch, num_heads, seqlen_q, seqlen_k]"},
    {with_all, [](auto& a) { a.attn_mask.dims[1] = 4; }, "attn_mask dim 1 (num_heads) is 4, the plan's is 1"},
    {with_all, [](auto& a) { a.attn_bias.dims[1] = 1; }, "attn_bias dim 1 (num_heads) is 1, the plan's is 4"},
    {with_all, [](auto& a) { a.attn_bias.dtype = DType::kFloat32; }, "attn_bias is float32, expected float16"},
    {with_all, [](auto& a) { a.attn_bias.data = nullptr; }, "attn_bias is null, has 20 elements"},
    {as_it_is, [](auto& a) { a.sink_logits = a.query; }, "sink_logits is given, but the plan was made without"},
    {with_all, [](auto& a) { a.sink_logits = {}; }, "sink_logits is missing"},
    {without_softmax, [](auto& a) { a.logsumexp = a.out; },
     "logsumexp is given, but normalizer is none: there is no logsumexp"},
    {with_all, [](auto& a) { a.sink_logits.ndim = 2; }, "sink_logits has 2 dims, expected 1: [num_heads]"},
    {with_all, [](auto& a) { a.sink_logits.dtype = DType::kFloat16; }, "sink_logits is float16, expected float32"},
    {with_all, [](auto& a) { a.alibi_slopes = {}; }, "alibi_slopes is missing"},
    {with_all, [](auto& a) { a.alibi_slopes.ndim = 1; }, "alibi_slopes has 1 dims, expected 2: [batch, num_heads]"},
    {with_all, [](auto& a) { a.alibi_slopes.dtype = DType::kFloat64; }, "alibi_slopes is float64, expected float32"},
    {with_all, [](auto& a) { a.seqlens_q = {}; }, "seqlens_q is missing"},
    {with_all, [](auto& a) { a.seqlens_q.dtype = DType::kBool; }, "seqlens_q is bool, expected int32 or int64"},
    {with_all, [](auto& a) { a.seqlens_k.dims[0] = 3; }, "seqlens_k dim 0 is 3, expected batch 2"},
    {with_all, [](auto& a) { a.seqlens_k.data = nullptr; }, "seqlens_k is null, has 2 elements"},
    {with_all, [](auto& a) { a.query_offsets = {}; }, "query_offsets is missing"},
    {with_all,
     [](auto& a) {
       set(a.seqlens_q, {5, 6});
     },
     "seqlens_q[1] is 6, must be 0 to seqlen_q 5"},
    {with_all,
     [](auto& a) {
       set(a.seqlens_k, {-1, 0});
     },
     "seqlens_k[0] is -1, must be 0 to seqlen_k 5"},
    {with_all,
     [](auto& a) {
       set(a.seqlens_k, {0, kMax});
     },
     "seqlens_k[1] is 9223372036854775807, must be 0 to seqlen_k 5"},
    {with_all, [](auto& a) { a.attn_weights = {}; }, "attn_weights is missing"},
    {with_all, [](auto& a) { a.attn_weights.dims[2] = 4; }, "attn_weights dim 2 is 4, expected seqlen_q 5"},
    {with_all, [](auto& a) { a.attn_weights.strides[3] = 0; },
     "attn_weights overlaps itself: two indices name one element"},
    {with_all, [](auto& a) { a.attn_weights.data = a.attn_mask.data; }, "attn_weights overlaps attn_mask"},
    {with_all, [](auto& a) { a.column_sums = {}; }, "column_sums is missing"},
    {with_all, [](auto& a) { a.column_sums.data = a.attn_weights.data; }, "column_sums overlaps attn_weights"},
    {with_all, [](auto& a) { a.column_sums.data = a.seqlens_k.data; }, "column_sums overlaps seqlens_k"},
    {with_lengths,
     [](auto& a) {
       set(a.seqlens_q, {2, 1}), set(a.seqlens_k, {2, 4});
     },
     std::string("causal needs align: sequence 1 has seqlen_q 1 and seqlen_k 4") + kAlignChoices},
    {packed, [](auto& a) { a.cu_seqlens_q = {}; }, "cu_seqlens_q is missing"},
    {packed, [](auto& a) { a.cu_seqlens_k.dims[0] = 2; }, "cu_seqlens_k dim 0 is 2, expected batch + 1 = 3"},
    {packed,
     [](auto& a) {
       set(a.cu_seqlens_q, {1, 2, 3});
     },
     "cu_seqlens_q[0] is 1, must be 0"},
    {packed,
     [](auto& a) {
       set(a.cu_seqlens_k, {0, 4, 3});
     },
     "cu_seqlens_k[2] is 3, must not be less than the 4 before it"},
    {packed,
     [](auto& a) {
       set(a.cu_seqlens_k, {0, -1, 3});
     },
     "cu_seqlens_k[1] is -1, must not be less than the 0 before it"},
    {packed,
     [](auto& a) {
       set(a.cu_seqlens_q, {0, 1, 4});
     },
     "cu_seqlens_q ends at 4, must be at most total_q 3"},
    {packed,
     [](auto& a) {
       set(a.cu_seqlens_k, {0, 1, 6});
     },
     "cu_seqlens_k ends at 6, must be at most total_k 5"},
    {packed, [](auto& a) { a.query.ndim = 4; }, "query has 4 dims, expected 3: [total_q, num_heads, head_dim]"},
    {packed, [](auto& a) { a.logsumexp.dims[0] = 3; }, "logsumexp dim 0 is 3, expected num_heads 4"},
    {packed_causal,
     [](auto& a) {
       set(a.cu_seqlens_q, {0, 1, 3}), set(a.cu_seqlens_k, {0, 1, 5});
     },
     std::string("causal needs align: sequence 1 has seqlen_q 2 and seqlen_k 4") + kAlignChoices},
};

TEST(ForwardErrors, EachNamesTheArgumentAndNoOutputIsTouched) {
  for (const BadCall& bad : kBadCalls) {
    AttentionDesc desc = good_desc();
    bad.plan(desc);
    const Result<Plan> made = plan(desc);
    ASSERT_TRUE(made.ok()) << made.status().message();
    {
      Call call(desc);
      call.reserve(*made);
      ASSERT_TRUE(made->forward(call.args).ok()) << bad.message;
    }
    Call call(desc);
    call.reserve(*made);
    bad.change(call.args);
    const Status status = made->forward(call.args);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << bad.message;
    EXPECT_EQ(status.message(), bad.message);
    EXPECT_TRUE(call.outputs_untouched()) << bad.message;
  }
}

TEST(ForwardErrors, Workspace) {
  const Result<Plan> made = plan(good_desc(), {.kernel = "reference"});
  ASSERT_TRUE(made.ok());
  const size_t bytes = made->workspace_bytes();
  ASSERT_GT(bytes, 0u);
  EXPECT_EQ(bytes % 64, 0u);
  auto message = [&](auto change) {
    Call call(good_desc());
    call.reserve(*made);
    change(call.args);
    const std::string got = made->forward(call.args).message();
    EXPECT_EQ(call.outputs_untouched(), !got.empty());
    return got;
  };
  const std::string needed = std::to_string(bytes);
  EXPECT_EQ(message([](ForwardArgs&) {}), "");
  EXPECT_EQ(message([](ForwardArgs& a) { a.workspace = nullptr; }), "workspace is null, needs " + needed + " bytes");
  EXPECT_EQ(message([](ForwardArgs& a) { --a.workspace_bytes; }),
            "workspace_bytes is " + std::to_string(bytes - 1) + ", needs " + needed);
  EXPECT_EQ(message([](ForwardArgs& a) { a.workspace = static_cast<char*>(a.workspace) + 32; }),
            "workspace is not aligned to 64 bytes");
  EXPECT_EQ(message([](ForwardArgs& a) { a.workspace = reinterpret_cast<void*>(~uintptr_t{63}); }),
            bytes <= 64 ? "" : "workspace reaches beyond the address space");
  EXPECT_EQ(message([](ForwardArgs& a) { a.key.data = a.workspace; }), "workspace overlaps key");
}

TEST(Forward, AViewBesideTheInputsInOneBufferIsNoOverlap) {
  AttentionDesc desc = good_desc();
  desc.seqlen_k = desc.seqlen_q;
  desc.num_heads_kv = desc.num_heads;
  desc.head_dim_v = desc.head_dim;
  const Result<Plan> made = plan(desc);
  ASSERT_TRUE(made.ok());
  std::vector<float> buffer(2 * 3 * 4 * 4 * 8);  // [batch, seqlen, query | key | value | out, heads, dim]
  Call call(desc);
  call.reserve(*made);
  Tensor* const views[] = {&call.args.query, &call.args.key, &call.args.value, &call.args.out};
  for (int i = 0; i < 4; ++i) {
    views[i]->data = buffer.data() + i * 32;
    views[i]->strides[0] = 3 * 128;
    views[i]->strides[1] = 128;
  }
  EXPECT_EQ(made->forward(call.args).message(), "");
  call.args.out.data = buffer.data() + 2 * 32 + 8;
  EXPECT_EQ(made->forward(call.args).message(), "out overlaps value");
}

TEST(Forward, AllocatesNothing) {
  for (void (*const change)(AttentionDesc&) : {as_it_is, with_all, packed}) {
    AttentionDesc desc = good_desc();
    change(desc);
    const Result<Plan> made = plan(desc);
    ASSERT_TRUE(made.ok());
    Call call(desc);
    call.reserve(*made);
    ASSERT_TRUE(made->forward(call.args).ok());
    const int64_t before = num_allocations;
    const bool ok = made->forward(call.args).ok();
    EXPECT_EQ(num_allocations, before);
    EXPECT_TRUE(ok);
  }
}

const Status& status_of(const Status& status) { return status; }
const Status& status_of(const Result<Plan>& made) { return made.status(); }
const Status& status_of(const Explanation& explanation) { return explanation.status; }

// `call` with each of its allocations failing in turn, until it needs no more; the number of those.
template <class F>
int64_t fail_each_allocation(const F& call) {
  for (int64_t n = 0;; ++n) {
    failing_allocation = num_allocations + n;
    const auto outcome = call();
    const bool failed = num_allocations > failing_allocation;
    failing_allocation = -1;
    if (!failed) return n;
    EXPECT_EQ(status_of(outcome).code(), StatusCode::kOutOfMemory) << n;
    EXPECT_EQ(status_of(outcome).message(), "out of memory") << n;
  }
}

TEST(OutOfMemory, IsAStatusWhereverItHappens) {
  AttentionDesc bad = good_desc();
  bad.num_heads_kv = 3;
  EXPECT_GT(fail_each_allocation([&] { return plan(bad); }), 0);
  EXPECT_GT(fail_each_allocation([&] { return explain(bad); }), 0);
  EXPECT_GT(fail_each_allocation([&] { return plan(good_desc(), {.kernel = "none"}); }), 0);
  AttentionDesc wide = good_desc();
  wide.head_dim = 1000;  // more than the fast kernels take, which say so
  fail_each_allocation([&] { return plan(wide); });
  fail_each_allocation([&] { return explain(wide); });

  const Result<Plan> made = plan(good_desc());
  ASSERT_TRUE(made.ok());
  Call call(good_desc());
  call.reserve(*made);
  call.args.key.dims[1] = 6;
  EXPECT_GT(fail_each_allocation([&] { return made->forward(call.args); }), 0);
  EXPECT_TRUE(call.outputs_untouched());
}

TEST(Forward, OnePlanOnManyThreads) {
  AttentionDesc desc = good_desc();
  with_all(desc);
  const Result<Plan> made = plan(desc);
  ASSERT_TRUE(made.ok());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        Call call(desc);
        call.reserve(*made);
        EXPECT_TRUE(made->forward(call.args).ok());
        EXPECT_FALSE(call.outputs_untouched());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// Every element of `t` is `expected`: exactly where that is 0 (its sign too) or infinite, else but for rounding.
bool all_are(const Tensor& t, double expected) {
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    const double got = load_element(t.data, t.dtype, i);
    const bool exact = expected == 0 || std::isinf(expected);
    if (exact && (got != expected || std::signbit(got) != std::signbit(expected))) return false;
    if (!(exact || std::abs(got - expected) < 1e-6)) return false;
  }
  return true;
}

// Every combination of sizes 0, 1 and more, with each kind of option: no crash, and the contract's answer where no
// query can see a key. Where keys are seen, inputs of zero give O = 0 and finite L.
TEST(Forward, EmptySizes) {
  int planned = 0;
  for (int n = 0; n < 3 * 3 * 3 * 3 * 3 * 3 * 3; ++n) {
    int rest = n;
    auto size = [&rest](int64_t many) {
      const int which = rest % 3;
      rest /= 3;
      return which < 2 ? int64_t{which} : many;
    };
    AttentionDesc sizes;
    sizes.batch = size(2);
    sizes.seqlen_q = size(3);
    sizes.seqlen_k = size(5);
    sizes.num_heads = size(4);
    sizes.num_heads_kv = size(2);
    sizes.head_dim = size(8);
    sizes.head_dim_v = size(6);
    if (sizes.num_heads % std::max<int64_t>(sizes.num_heads_kv, 1) != 0) continue;
    if (sizes.num_heads > 0 && sizes.num_heads_kv == 0) continue;
    for (int kind = 0; kind < 4; ++kind) {
      AttentionDesc desc = sizes;
      desc.packed = kind == 1;
      desc.return_weights = kind == 2   ? ReturnWeights::kMean
                            : kind == 3 ? ReturnWeights::kPerHead
                                        : ReturnWeights::kNone;
      desc.return_column_sums = desc.attn_mask.given = kind >= 2;
      if (kind >= 2) desc.attn_mask = operand(DType::kBool, 1, desc.num_heads, desc.seqlen_q, desc.seqlen_k);
      for (const char* kernel : {"", "reference"}) {
        const Result<Plan> made = plan(desc, {.kernel = kernel});
        ASSERT_TRUE(made.ok()) << made.status().message();
        ++planned;
        Call call(desc);
        call.reserve(*made);
        if (desc.packed && desc.batch > 0) {
          for (int64_t b = 0; b < desc.batch; ++b) {  // the last sequence holds all
            static_cast<int32_t*>(call.args.cu_seqlens_q.data)[b] = 0;
            static_cast<int64_t*>(call.args.cu_seqlens_k.data)[b] = 0;
          }
          static_cast<int32_t*>(call.args.cu_seqlens_q.data)[desc.batch] = static_cast<int32_t>(desc.seqlen_q);
          static_cast<int64_t*>(call.args.cu_seqlens_k.data)[desc.batch] = desc.seqlen_k;
        }
        ASSERT_EQ(made->forward(call.args).message(), "");
        const bool blind = desc.batch == 0 || desc.seqlen_k == 0 || desc.num_heads == 0;
        const auto at = "sizes " + std::to_string(n) + " kind " + std::to_string(kind) + " " + kernel;
        EXPECT_TRUE(all_are(call.args.out, 0)) << at;
        EXPECT_TRUE(all_are(call.args.logsumexp, blind ? -kInf : std::log(static_cast<double>(desc.seqlen_k)))) << at;
        EXPECT_TRUE(!blind || all_are(call.args.attn_weights, 0)) << at;
        EXPECT_TRUE(!(blind || desc.seqlen_q == 0) || all_are(call.args.column_sums, 0)) << at;
      }
    }
  }
  EXPECT_GT(planned, 5000);
}

TEST(Forward, StridesOfSingleIndicesMeanNothing) {
  AttentionDesc desc;
  desc.seqlen_q = desc.seqlen_k = desc.head_dim = desc.head_dim_v = 1;
  const Result<Plan> made = plan(desc);
  ASSERT_TRUE(made.ok());
  Call call(desc);
  call.reserve(*made);
  for (Tensor* t : {&call.args.query, &call.args.key, &call.args.value, &call.args.out, &call.args.logsumexp}) {
    for (int i = 0; i < t->ndim; ++i) t->strides[i] = i % 2 == 0 ? kMax : -kMax;
  }
  EXPECT_EQ(made->forward(call.args).message(), "");
  EXPECT_TRUE(all_are(call.args.out, 0));
  EXPECT_TRUE(all_are(call.args.logsumexp, 0));
}

}  // namespace
}  // namespace polyhead
