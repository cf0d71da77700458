// A backend that the library does not have, added by a test's build: it computes through the C++ and the C interface.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "contract/linear.h"
#include "polyhead/block.h"
#include "polyhead/kernels.h"
#include "polyhead/matrix_product.h"
#include "polyhead/polyhead.h"
#include "polyhead/polyhead_block.h"
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

LayerDesc layer_desc(int64_t head_dim) {
  LayerDesc desc;
  desc.seqlen_q = desc.seqlen_k = 3;
  desc.query_size = desc.key_size = desc.value_size = desc.out_proj_size = 4;
  desc.query_proj_size = desc.key_proj_size = desc.value_proj_size = head_dim;
  return desc;
}

FeedForwardBlockDesc feed_forward_desc() {
  FeedForwardBlockDesc desc;
  desc.seqlen = 3, desc.size = 4, desc.inner_size = 8;
  return desc;
}

// What every layer, block and product on the CPU says that is told to use it.
std::string no_products() {
  std::string able;
  for (const linear::Kernel* kernel : linear::kernel_list()) {
    if (kernel->device == Device::kCpu) able += std::string(able.empty() ? "" : ", ") + kernel->name;
  }
  return "kernel is dummy, the kernels with matrix products are " + able;
}

TEST(Dummy, HasNoProducts) {
  const PlanOptions options = {.kernel = "dummy"};
  const auto expect_refused = [](const auto& made) {
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(made.status().message(), no_products());
  };
  expect_refused(layer(layer_desc(8), options));
  AttentionBlockDesc block;
  block.layer = layer_desc(8);
  expect_refused(attention_block(block, options));
  expect_refused(feed_forward_block(feed_forward_desc(), options));
  expect_refused(matrix_product({.m = 2, .n = 2, .k = 2}, options));
}

TEST(Dummy, HasNoProductsThroughC) {
  polyhead_plan_options options;
  ASSERT_EQ(polyhead_plan_options_init(&options, sizeof options), POLYHEAD_OK);
  options.kernel = "dummy";
  polyhead_layer_desc c;
  ASSERT_EQ(polyhead_layer_desc_init(&c, sizeof c), POLYHEAD_OK);
  const LayerDesc desc = layer_desc(8);
  c.seqlen_q = desc.seqlen_q, c.seqlen_k = desc.seqlen_k, c.query_size = desc.query_size, c.key_size = desc.key_size;
  c.value_size = desc.value_size, c.out_proj_size = desc.out_proj_size, c.query_proj_size = desc.query_proj_size;
  c.key_proj_size = desc.key_proj_size, c.value_proj_size = desc.value_proj_size;
  polyhead_layer* made = nullptr;
  EXPECT_EQ(polyhead_layer_create(&c, &options, &made), POLYHEAD_INVALID_ARGUMENT);
  EXPECT_EQ(polyhead_last_error(), no_products());
  polyhead_attention_block_desc block;
  ASSERT_EQ(polyhead_attention_block_desc_init(&block, sizeof block), POLYHEAD_OK);
  block.layer = &c;
  polyhead_attention_block* made_block = nullptr;
  EXPECT_EQ(polyhead_attention_block_create(&block, &options, &made_block), POLYHEAD_INVALID_ARGUMENT);
  EXPECT_EQ(polyhead_last_error(), no_products());
  polyhead_feed_forward_block_desc inner;
  ASSERT_EQ(polyhead_feed_forward_block_desc_init(&inner, sizeof inner), POLYHEAD_OK);
  polyhead_feed_forward_block* made_inner = nullptr;
  EXPECT_EQ(polyhead_feed_forward_block_create(&inner, &options, &made_inner), POLYHEAD_INVALID_ARGUMENT);
  EXPECT_EQ(polyhead_last_error(), no_products());
}

// In float64, which the kernels before it refuse: it computes the attention, and the best kernel with products of float64
// multiplies.
TEST(Dummy, ComputesInALayerWhereItIsTheBest) {
  LayerDesc desc = layer_desc(8);
  desc.dtype = DType::kFloat64;
  const Result<Layer> got = layer(desc), want = layer(desc, {.kernel = "reference"});
  ASSERT_TRUE(got.ok()) << got.status().message();
  EXPECT_STREQ(got->kernel_name(), "dummy");
  std::vector<double> x(12), weights(got->weights_bytes() / 8), out[2];
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<double>(i % 5) - 2;
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<double>(i * 37 % 64) / 640;
  const int before = dummy_calls;
  for (const Layer* made : {&*got, &*want}) {
    std::vector<double>& result = out[made == &*want];
    result.resize(12);
    const std::unique_ptr<void, decltype(&std::free)> workspace(std::aligned_alloc(64, made->workspace_bytes()),
                                                                std::free);
    LayerForwardArgs args;
    args.query = args.key = args.value = Tensor(x.data(), DType::kFloat64, {1, 3, 4});
    args.weights = made->weights_in(weights.data());
    args.out = Tensor(result.data(), DType::kFloat64, {1, 3, 4});
    args.workspace = workspace.get(), args.workspace_bytes = made->workspace_bytes();
    const Status status = made->forward(args);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  EXPECT_EQ(dummy_calls, before + 1);
  EXPECT_EQ(out[0], out[1]);
  EXPECT_NE(out[0], std::vector<double>(12));
}

}  // namespace
}  // namespace polyhead
