// A backend that the library does not have, added by a test's build: it computes through the C++ and the C interface.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "polyhead/kernels.h"
#include "polyhead/polyhead.h"
#include "reference/attention.h"
#include "small_call.h"

namespace polyhead {
extern std::atomic<int> dummy_calls;

namespace {

AttentionDesc desc_of_all() {
  AttentionDesc desc = good_desc();
  desc.causal = desc.has_seqlens_k = true;
  desc.align = Align::kTopLeft;
  desc.attn_bias = operand(DType::kFloat32, 1, 4, 1, 5);
  return desc;
}

void fill(const Tensor& t, int seed) {
  auto* data = static_cast<float*>(t.data);
  for (int64_t i = 0; i < t.num_elements(); ++i) data[i] = static_cast<float>((i * 37 + seed * 11) % 64) / 32 - 1;
}

void fill(BackwardCall& call) {
  int n = 1;
  BackwardArgs& b = call.backward;
  for (const Tensor* t : {&b.forward.query, &b.forward.key, &b.forward.value, &b.forward.attn_bias, &b.grad_out}) {
    fill(*t, n++);
  }
  set(b.forward.seqlens_k, {3, 3});
  b.delta = b.grad_logsumexp = {};
}

void expect_same(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(std::memcmp(a.data, b.data, static_cast<size_t>(a.num_elements()) * 4), 0);
}

TEST(Dummy, IsListedAndComputes) {
  const AttentionDesc desc = desc_of_all();
  const auto names = kernels();
  EXPECT_NE(std::find(names.begin(), names.end(), "dummy"), names.end());
  const Result<Plan> made = plan(desc, {.kernel = "dummy"});
  ASSERT_TRUE(made.ok()) << made.status().message();
  BackwardCall got(desc), want(desc);
  fill(got), fill(want);
  got.reserve(*made), want.reserve(*made);
  const int before = dummy_calls;
  ASSERT_TRUE(made->forward(got.backward.forward).ok());
  ASSERT_TRUE(made->backward(got.backward).ok());
  EXPECT_EQ(dummy_calls, before + 2);
  reference::forward<float>(desc, want.backward.forward);
  reference::backward<float>(desc, want.backward);
  expect_same(got.args.out, want.args.out);
  expect_same(got.backward.grad_query, want.backward.grad_query);
  expect_same(got.backward.grad_attn_bias, want.backward.grad_attn_bias);
  set(got.backward.forward.seqlens_k, {3, 6});
  EXPECT_EQ(made->forward(got.backward.forward).message(), "seqlens_k[1] is 6, must be 0 to seqlen_k 5");
}

polyhead_tensor c_tensor(const Tensor& t) {
  polyhead_tensor c = {};
  c.data = t.data, c.dtype = static_cast<int32_t>(t.dtype), c.ndim = t.ndim;
  std::copy(t.dims, t.dims + Tensor::kMaxDims, c.dims);
  std::copy(t.strides, t.strides + Tensor::kMaxDims, c.strides);
  return c;
}

TEST(Dummy, ComputesThroughC) {
  const AttentionDesc desc = good_desc();
  polyhead_attention_desc c;
  ASSERT_EQ(polyhead_attention_desc_init(&c, sizeof c), POLYHEAD_OK);
  c.batch = desc.batch, c.seqlen_q = desc.seqlen_q, c.seqlen_k = desc.seqlen_k, c.num_heads = desc.num_heads;
  c.num_heads_kv = desc.num_heads_kv, c.head_dim = desc.head_dim, c.head_dim_v = desc.head_dim_v;
  polyhead_plan_options options;
  ASSERT_EQ(polyhead_plan_options_init(&options, sizeof options), POLYHEAD_OK);
  options.kernel = "dummy";
  polyhead_attention_plan* made = nullptr;
  ASSERT_EQ(polyhead_attention_plan_create(&c, &options, &made), POLYHEAD_OK) << polyhead_last_error();
  Call got(desc), want(desc);
  for (Call* call : {&got, &want}) {
    fill(call->args.query, 1), fill(call->args.key, 2), fill(call->args.value, 3);
    call->reserve(polyhead_attention_plan_workspace_bytes(made));
  }
  polyhead_forward_args args;
  ASSERT_EQ(polyhead_forward_args_init(&args, sizeof args), POLYHEAD_OK);
  args.query = c_tensor(got.args.query), args.key = c_tensor(got.args.key), args.value = c_tensor(got.args.value);
  args.out = c_tensor(got.args.out), args.logsumexp = c_tensor(got.args.logsumexp);
  args.workspace = got.args.workspace, args.workspace_bytes = got.args.workspace_bytes;
  const int before = dummy_calls;
  EXPECT_EQ(polyhead_attention_forward(made, &args), POLYHEAD_OK) << polyhead_last_error();
  EXPECT_EQ(dummy_calls, before + 1);
  reference::forward<float>(desc, want.args);
  expect_same(got.args.out, want.args.out);
  expect_same(got.args.logsumexp, want.args.logsumexp);
  polyhead_attention_plan_destroy(made);
}

}  // namespace
}  // namespace polyhead
