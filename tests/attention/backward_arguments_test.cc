// What Plan::backward refuses, in which words, and what it does at the edges. Results: reference_gradient_test.cc.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "count_allocations.h"
#include "small_call.h"

namespace polyhead {
namespace {

struct BadCall {
  void (*plan)(AttentionDesc& desc);
  void (*change)(BackwardArgs& args);
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
void dropping(AttentionDesc& d) { d.dropout_p = 0.5; }
void without_softmax(AttentionDesc& d) { d.normalizer = Normalizer::kNone; }
void in_float64(AttentionDesc& d) { d.dtype = DType::kFloat64; }
void in_bfloat16(AttentionDesc& d) { d.dtype = DType::kBFloat16; }

constexpr char kNotAsked[] =
    "no gradient is asked for: give grad_query, grad_key, grad_value, grad_attn_bias, grad_alibi_slopes or "
    "grad_sink_logits";

const BadCall kBadCalls[] = {
    // The inputs and options are those of forward, whose test has every sentence; here one of each kind.
    {dropping, [](auto& a) { a.forward.dropout_seed.reset(); },
     "dropout_seed is not given, must be where dropout_p is 0.5"},
    {as_it_is, [](auto& a) { a.forward.query = {}; }, "query is missing"},
    {as_it_is, [](auto& a) { a.forward.key.dtype = DType::kFloat16; }, "key is float16, expected float32"},
    {as_it_is, [](auto& a) { a.forward.value.dims[1] = 4; }, "value dim 1 is 4, expected seqlen_k 5"},
    {as_it_is, [](auto& a) { a.forward.attn_bias = a.forward.query; },
     "attn_bias is given, but the plan was made without"},
    {with_all, [](auto& a) { a.forward.attn_mask = {}; }, "attn_mask is missing"},
    {with_all, [](auto& a) { a.forward.attn_bias.dims[1] = 1; }, "attn_bias dim 1 (num_heads) is 1, the plan's is 4"},
    {with_all, [](auto& a) { a.forward.query_offsets.dtype = DType::kBool; },
     "query_offsets is bool, expected int32 or int64"},
    {with_all,
     [](auto& a) {
       set(a.forward.seqlens_q, {5, 6});
     },
     "seqlens_q[1] is 6, must be 0 to seqlen_q 5"},
    {with_lengths,
     [](auto& a) {
       set(a.forward.seqlens_q, {2, 1}), set(a.forward.seqlens_k, {2, 4});
     },
     std::string("causal needs align: sequence 1 has seqlen_q 1 and seqlen_k 4") + kAlignChoices},
    {packed, [](auto& a) { a.forward.cu_seqlens_q = {}; }, "cu_seqlens_q is missing"},
    {packed,
     [](auto& a) {
       set(a.forward.cu_seqlens_k, {0, 1, 6});
     },
     "cu_seqlens_k ends at 6, must be at most total_k 5"},
    // What forward wrote.
    {as_it_is, [](auto& a) { a.forward.logsumexp = {}; }, "logsumexp is missing: backward needs what forward wrote"},
    {as_it_is, [](auto& a) { a.forward.logsumexp.dims[2] = 4; }, "logsumexp dim 2 is 4, expected seqlen_q 3"},
    {as_it_is, [](auto& a) { a.forward.logsumexp.dtype = DType::kBFloat16; },
     "logsumexp is bfloat16, expected float32"},
    {in_float64, [](auto& a) { a.forward.logsumexp.dtype = DType::kFloat32; },
     "logsumexp is float32, expected float64"},
    {packed, [](auto& a) { a.forward.logsumexp.ndim = 3; }, "logsumexp has 3 dims, expected 2: [num_heads, total_q]"},
    {as_it_is, [](auto& a) { a.forward.out = a.delta = {}; },
     "out is missing: backward needs what forward wrote, or delta in its place"},
    {as_it_is, [](auto& a) { a.forward.out.dims[3] = 8; }, "out dim 3 is 8, expected head_dim_v 6"},
    {as_it_is, [](auto& a) { a.forward.out.data = nullptr; }, "out is null, has 144 elements"},
    {as_it_is, [](auto& a) { a.forward.attn_weights = a.forward.out; },
     "attn_weights is given to backward, but has no gradient: leave it out"},
    {with_all, [](auto& a) { a.forward.attn_weights = a.forward.out; },
     "attn_weights is given to backward, but has no gradient: leave it out"},
    {with_all, [](auto& a) { a.forward.column_sums = a.forward.out; },
     "column_sums is given to backward, but has no gradient: leave it out"},
    // The gradients that come in.
    {as_it_is, [](auto& a) { a.grad_out = {}; }, "grad_out is missing"},
    {in_bfloat16, [](auto& a) { a.grad_out.dtype = DType::kFloat32; }, "grad_out is float32, expected bfloat16"},
    {as_it_is, [](auto& a) { a.grad_out.ndim = 3; },
     "grad_out has 3 dims, expected 4: [batch, seqlen_q, num_heads, head_dim_v]"},
    {as_it_is, [](auto& a) { a.grad_out.dims[3] = 8; }, "grad_out dim 3 is 8, expected head_dim_v 6"},
    {as_it_is, [](auto& a) { a.grad_out.data = nullptr; }, "grad_out is null, has 144 elements"},
    {as_it_is, [](auto& a) { a.grad_out.device = Device::kCuda; },
     "grad_out is not on the CPU, where this call computes"},
    {as_it_is, [](auto& a) { a.grad_out.data = static_cast<char*>(a.grad_out.data) + 1; },
     "grad_out is not aligned to its elements of 4 bytes"},
    {as_it_is, [](auto& a) { a.grad_out.strides[1] = kMax; },
     "grad_out reaches beyond the address space, by its strides"},
    {as_it_is, [](auto& a) { a.grad_logsumexp.dtype = DType::kFloat64; },
     "grad_logsumexp is float64, expected float32"},
    {as_it_is, [](auto& a) { a.grad_logsumexp.dims[1] = 2; }, "grad_logsumexp dim 1 is 2, expected num_heads 4"},
    {without_softmax, [](auto& a) { a.forward.logsumexp = a.grad_out; },
     "logsumexp is given, but normalizer is none: there is no logsumexp"},
    {without_softmax, [](auto& a) { a.grad_logsumexp = a.grad_out; },
     "grad_logsumexp is given, but normalizer is none: there is no logsumexp"},
    {without_softmax, [](auto& a) { a.delta = a.grad_out; },
     "delta is given, but normalizer is none: there is no logsumexp"},
    {as_it_is, [](auto& a) { a.delta.ndim = 4; }, "delta has 4 dims, expected 3: [batch, num_heads, seqlen_q]"},
    {packed, [](auto& a) { a.delta.dims[1] = 2; }, "delta dim 1 is 2, expected total_q 3"},
    // The gradients that go out.
    {as_it_is, [](auto& a) { a.grad_query = a.grad_key = a.grad_value = {}; }, kNotAsked},
    {with_all,
     [](auto& a) {
       a.grad_query = a.grad_key = a.grad_value = a.grad_attn_bias = a.grad_alibi_slopes = a.grad_sink_logits = {};
     },
     kNotAsked},
    {as_it_is, [](auto& a) { a.grad_query.dims[1] = 4; }, "grad_query dim 1 is 4, expected seqlen_q 3"},
    {as_it_is, [](auto& a) { a.grad_key.dims[2] = 4; }, "grad_key dim 2 is 4, expected num_heads_kv 2"},
    {as_it_is, [](auto& a) { a.grad_value.dims[3] = 8; }, "grad_value dim 3 is 8, expected head_dim_v 6"},
    {in_bfloat16, [](auto& a) { a.grad_key.dtype = DType::kFloat32; }, "grad_key is float32, expected bfloat16"},
    {packed, [](auto& a) { a.grad_value.ndim = 4; },
     "grad_value has 4 dims, expected 3: [total_k, num_heads_kv, head_dim_v]"},
    {as_it_is, [](auto& a) { a.grad_value.data = nullptr; }, "grad_value is null, has 120 elements"},
    {as_it_is, [](auto& a) { a.grad_attn_bias = a.grad_query; },
     "grad_attn_bias is given, but the plan was made without attn_bias"},
    {as_it_is, [](auto& a) { a.grad_alibi_slopes = a.grad_query; },
     "grad_alibi_slopes is given, but the plan was made without alibi_slopes"},
    {with_all, [](auto& a) { a.grad_attn_bias.dims[0] = 2; }, "grad_attn_bias dim 0 (batch) is 2, the plan's is 1"},
    {with_all, [](auto& a) { a.grad_attn_bias.dims[3] = 5; }, "grad_attn_bias dim 3 (seqlen_k) is 5, the plan's is 1"},
    {with_all, [](auto& a) { a.grad_attn_bias.dtype = DType::kFloat32; },
     "grad_attn_bias is float32, expected float16"},
    {as_it_is, [](auto& a) { a.grad_sink_logits = a.grad_query; },
     "grad_sink_logits is given, but the plan was made without sink_logits"},
    {with_all, [](auto& a) { a.grad_sink_logits.dims[0] = 3; }, "grad_sink_logits dim 0 is 3, expected num_heads 4"},
    {with_all, [](auto& a) { a.grad_sink_logits.dtype = DType::kFloat16; },
     "grad_sink_logits is float16, expected float32"},
    {with_all, [](auto& a) { a.grad_alibi_slopes.ndim = 1; },
     "grad_alibi_slopes has 1 dims, expected 2: [batch, num_heads]"},
    {with_all, [](auto& a) { a.grad_alibi_slopes.dtype = DType::kFloat16; },
     "grad_alibi_slopes is float16, expected float32"},
    {as_it_is, [](auto& a) { a.grad_key.strides[0] = 0; }, "grad_key overlaps itself: two indices name one element"},
    {with_all, [](auto& a) { a.grad_attn_bias.strides[1] = 0; },
     "grad_attn_bias overlaps itself: two indices name one element"},
    {as_it_is, [](auto& a) { a.grad_query.data = a.forward.query.data; }, "grad_query overlaps query"},
    {as_it_is, [](auto& a) { a.grad_value.data = a.grad_out.data; }, "grad_value overlaps grad_out"},
    {as_it_is, [](auto& a) { a.grad_value.data = a.forward.out.data; }, "grad_value overlaps out"},
    {as_it_is, [](auto& a) { a.grad_value.data = a.grad_query.data; }, "grad_value overlaps grad_query"},
    {with_all, [](auto& a) { a.grad_attn_bias.data = a.forward.attn_bias.data; }, "grad_attn_bias overlaps attn_bias"},
    {with_all, [](auto& a) { a.grad_alibi_slopes.data = a.grad_logsumexp.data; },
     "grad_alibi_slopes overlaps grad_logsumexp"},
    {with_all, [](auto& a) { a.grad_alibi_slopes.data = a.forward.attn_mask.data; },
     "grad_alibi_slopes overlaps attn_mask"},
    {with_all, [](auto& a) { a.grad_alibi_slopes.data = a.forward.logsumexp.data; },
     "grad_alibi_slopes overlaps logsumexp"},
    {with_all, [](auto& a) { a.grad_alibi_slopes.data = a.delta.data; }, "grad_alibi_slopes overlaps delta"},
};

TEST(BackwardErrors, EachNamesTheArgumentAndNoOutputIsTouched) {
  for (const BadCall& bad : kBadCalls) {
    AttentionDesc desc = good_desc();
    bad.plan(desc);
    const Result<Plan> made = plan(desc);
    ASSERT_TRUE(made.ok()) << made.status().message();
    {
      BackwardCall call(desc);
      call.reserve(*made);
      ASSERT_EQ(made->backward(call.backward).message(), "") << bad.message;
      EXPECT_FALSE(call.outputs_untouched());
    }
    BackwardCall call(desc);
    call.reserve(*made);
    bad.change(call.backward);
    const Status status = made->backward(call.backward);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << bad.message;
    EXPECT_EQ(status.message(), bad.message);
    EXPECT_TRUE(call.outputs_untouched()) << bad.message;
  }
}

TEST(BackwardErrors, WhatLooksOddButIsLegal) {
  void (*const changes[])(BackwardArgs&) = {
      [](BackwardArgs& a) { a.forward.out = {}; },  // delta says it
      [](BackwardArgs& a) { a.delta = {}; },
      [](BackwardArgs& a) { a.grad_logsumexp = {}; },
      [](BackwardArgs& a) { a.delta.data = a.grad_logsumexp.data; },  // inputs may overlap
      [](BackwardArgs& a) { a.grad_out = a.forward.out; },
      [](BackwardArgs& a) { a.grad_query = a.grad_key = {}; },
      [](BackwardArgs& a) { a.grad_query = a.grad_value = {}; },
      [](BackwardArgs& a) { a.grad_key = a.grad_value = {}; },
      [](BackwardArgs& a) { std::memset(a.grad_out.strides, 0, sizeof a.grad_out.strides); },
      [](BackwardArgs& a) {
        a.grad_out.data = static_cast<float*>(a.grad_out.data) + 5;
        a.grad_out.strides[3] = -1;
      },
  };
  for (const auto& change : changes) {
    const Result<Plan> made = plan(good_desc());
    ASSERT_TRUE(made.ok());
    BackwardCall call(good_desc());
    call.reserve(*made);
    change(call.backward);
    EXPECT_EQ(made->backward(call.backward).message(), "") << "case " << &change - changes;
  }
}

TEST(BackwardErrors, Workspace) {
  const Result<Plan> made = plan(good_desc(), {.kernel = "reference"});
  ASSERT_TRUE(made.ok());
  const size_t bytes = made->backward_workspace_bytes();
  ASSERT_GT(bytes, 0u);
  EXPECT_EQ(bytes % 64, 0u);
  auto message = [&](auto change) {
    BackwardCall call(good_desc());
    call.reserve(*made);
    call.backward.forward.workspace_bytes = bytes;
    change(call.backward);
    const std::string got = made->backward(call.backward).message();
    EXPECT_EQ(call.outputs_untouched(), !got.empty());
    return got;
  };
  const std::string needed = std::to_string(bytes);
  EXPECT_EQ(message([](BackwardArgs&) {}), "");
  EXPECT_EQ(message([](BackwardArgs& a) { a.forward.workspace = nullptr; }),
            "workspace is null, needs " + needed + " bytes");
  EXPECT_EQ(message([](BackwardArgs& a) { --a.forward.workspace_bytes; }),
            "workspace_bytes is " + std::to_string(bytes - 1) + ", needs " + needed);
  EXPECT_EQ(message([](BackwardArgs& a) { a.forward.workspace = static_cast<char*>(a.forward.workspace) + 32; }),
            "workspace is not aligned to 64 bytes");
  EXPECT_EQ(message([](BackwardArgs& a) { a.grad_out.data = a.forward.workspace; }), "workspace overlaps grad_out");
  EXPECT_EQ(message([](BackwardArgs& a) { a.grad_value.data = a.forward.workspace; }), "workspace overlaps grad_value");
}

TEST(Backward, GradientsSideBySideInOneBufferAreNoOverlap) {
  AttentionDesc desc = good_desc();
  desc.seqlen_k = desc.seqlen_q;
  desc.num_heads_kv = desc.num_heads;
  desc.head_dim_v = desc.head_dim;
  const Result<Plan> made = plan(desc);
  ASSERT_TRUE(made.ok());
  std::vector<float> buffer(2 * 3 * 3 * 4 * 8);  // [batch, seqlen, query | key | value, heads, dim]
  BackwardCall call(desc);
  call.reserve(*made);
  Tensor* const views[] = {&call.backward.grad_query, &call.backward.grad_key, &call.backward.grad_value};
  for (int i = 0; i < 3; ++i) {
    views[i]->data = buffer.data() + i * 32;
    views[i]->strides[0] = 3 * 96;
    views[i]->strides[1] = 96;
  }
  EXPECT_EQ(made->backward(call.backward).message(), "");
  views[2]->data = buffer.data() + 32 + 8;
  EXPECT_EQ(made->backward(call.backward).message(), "grad_value overlaps grad_key");
}

TEST(Backward, AllocatesNothing) {
  for (void (*const change)(AttentionDesc&) : {as_it_is, with_all, packed}) {
    AttentionDesc desc = good_desc();
    change(desc);
    for (const char* kernel : {"", "reference"}) {
      const Result<Plan> made = plan(desc, {.kernel = kernel});
      ASSERT_TRUE(made.ok());
      BackwardCall call(desc);
      call.reserve(*made);
      ASSERT_EQ(made->backward(call.backward).message(), "");
      const int64_t before = num_allocations;
      const bool ok = made->backward(call.backward).ok();
      EXPECT_EQ(num_allocations, before) << kernel;
      EXPECT_TRUE(ok);
    }
  }
}

bool all_are_zero(const Tensor& t) {
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    if (load_element(t.data, t.dtype, i) != 0) return false;
  }
  return true;
}

// Every combination of sizes 0, 1 and more, with each kind of option: no crash, every gradient written, and 0 where no
// query can see a key; with `accumulate`, left as it is there. Inputs of zero and grad_out of zero give 0 anywhere.
TEST(Backward, EmptySizes) {
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
    if (sizes.num_heads > 0 && (sizes.num_heads_kv == 0 || sizes.num_heads % sizes.num_heads_kv != 0)) continue;
    for (int kind = 0; kind < 4; ++kind) {
      AttentionDesc desc = sizes;
      desc.packed = kind == 1;
      if (kind == 1) desc.dtype = DType::kBFloat16;
      if (kind >= 2) desc.attn_bias = operand(DType::kFloat16, 1, desc.num_heads, desc.seqlen_q, desc.seqlen_k);
      if (kind == 2) desc.query_offset = 0, desc.alibi_slopes_ndim = 1;
      if (kind == 3) desc.has_seqlens_q = desc.has_seqlens_k = true;  // all 0: padding everywhere
      for (const char* kernel : {"", "reference"}) {
        const Result<Plan> made = plan(desc, {.kernel = kernel});
        ASSERT_TRUE(made.ok()) << made.status().message();
        ++planned;
        BackwardCall call(desc);
        call.reserve(*made);
        if (desc.packed) set(call.args.cu_seqlens_q, {0}), set(call.args.cu_seqlens_k, {0});
        for (int64_t b = 1; desc.packed && b <= desc.batch; ++b) {  // the first sequence holds all
          static_cast<int32_t*>(call.args.cu_seqlens_q.data)[b] = static_cast<int32_t>(desc.seqlen_q);
          static_cast<int64_t*>(call.args.cu_seqlens_k.data)[b] = desc.seqlen_k;
        }
        ASSERT_EQ(made->forward(call.args).message(), "");
        BackwardArgs& args = call.backward;
        if (n % 2 == 0) args.delta = {};
        const bool blind = desc.batch == 0 || desc.seqlen_q == 0 || desc.seqlen_k == 0 || desc.num_heads == 0;
        const auto at = "sizes " + std::to_string(n) + " kind " + std::to_string(kind) + " " + kernel;
        const Tensor* const gradients[] = {&args.grad_query, &args.grad_key, &args.grad_value, &args.grad_attn_bias,
                                           &args.grad_alibi_slopes};
        if (blind) {
          args.accumulate = true;
          ASSERT_EQ(made->backward(args).message(), "") << at;
          for (const Tensor* t : gradients) EXPECT_TRUE(t->num_elements() == 0 || !all_are_zero(*t)) << at;
          args.accumulate = false;
        }
        ASSERT_EQ(made->backward(args).message(), "") << at;
        for (const Tensor* t : gradients) EXPECT_TRUE(all_are_zero(*t)) << at;
      }
    }
  }
  EXPECT_GT(planned, 5000);
}

TEST(Backward, StridesOfSingleIndicesMeanNothing) {
  AttentionDesc desc;
  desc.seqlen_q = desc.seqlen_k = desc.head_dim = desc.head_dim_v = 1;
  for (const char* kernel : {"", "reference"}) {
    const Result<Plan> made = plan(desc, {.kernel = kernel});
    ASSERT_TRUE(made.ok());
    BackwardCall call(desc);
    call.reserve(*made);
    ASSERT_EQ(made->forward(call.args).message(), "");
    BackwardArgs& a = call.backward;
    for (Tensor* t : {&a.forward.query, &a.forward.key, &a.forward.value, &a.forward.out, &a.forward.logsumexp,
                      &a.grad_out, &a.grad_logsumexp, &a.delta, &a.grad_query, &a.grad_key, &a.grad_value}) {
      for (int i = 0; i < t->ndim; ++i) t->strides[i] = i % 2 == 0 ? kMax : -kMax;
    }
    *static_cast<float*>(a.grad_out.data) = 3;
    EXPECT_EQ(made->backward(a).message(), "");
    EXPECT_TRUE(all_are_zero(a.grad_query) && all_are_zero(a.grad_key));
    EXPECT_EQ(*static_cast<float*>(a.grad_value.data), 3);
  }
}

// The gradient of one query on one key is its value's alone, and what is there is added to.
TEST(Backward, Accumulates) {
  AttentionDesc desc;
  desc.seqlen_q = desc.seqlen_k = desc.head_dim = desc.head_dim_v = 1;
  for (const char* kernel : {"", "reference"}) {
    const Result<Plan> made = plan(desc, {.kernel = kernel});
    ASSERT_TRUE(made.ok());
    BackwardCall call(desc);
    call.reserve(*made);
    ASSERT_EQ(made->forward(call.args).message(), "");
    *static_cast<float*>(call.backward.grad_out.data) = 3;
    auto* const grad_value = static_cast<float*>(call.backward.grad_value.data);
    *grad_value = 4;
    call.backward.accumulate = true;
    EXPECT_EQ(made->backward(call.backward).message(), "");
    EXPECT_EQ(*grad_value, 7);
  }
}

}  // namespace
}  // namespace polyhead
