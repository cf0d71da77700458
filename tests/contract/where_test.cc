// Where a plan and its calls run: executors that change their mind, a call's own place, and the unchecked door.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "attention/unchecked.h"
#include "kernels_to_test.h"
#include "left_out.h"
#include "polyhead/block.h"
#include "polyhead/cuda.h"
#include "polyhead/matrix_product.h"
#include "small_call.h"
#include "testing/guard.h"

namespace polyhead::testing {
namespace {

// Says whatever number of threads it is told to, and runs what it is given one after the other, the last index first.
class Elastic final : public Executor {
 public:
  int num_threads() const override { return threads; }
  void parallel_for(int count, void (*body)(void*, int), void* context) override {
    most = std::max(most, count);
    for (int i = count - 1; i >= 0; --i) body(context, i);
  }
  int threads = 1;
  int most = 0;  // the largest count so far
};

// A forward and a backward call in a workspace that ends against a page that nobody may touch.
class GuardedCall {
 public:
  explicit GuardedCall(const AttentionDesc& desc) : call_(desc) {
    BackwardArgs& b = call_.backward;
    int n = 1;
    for (const Tensor* t : {&b.forward.query, &b.forward.key, &b.forward.value, &b.grad_out}) fill(*t, n++);
    if (desc.attn_bias.given) fill(b.forward.attn_bias, n++);
    b.delta = {};
    b.grad_logsumexp = {};
  }

  Status run(const Plan& plan, const Where& where) {
    const GuardedBytes forward(plan.workspace_bytes(), Guard::kEnd, 0xff);
    ForwardArgs args = call_.backward.forward;
    args.workspace = forward.data(), args.workspace_bytes = forward.size(), args.where = where;
    if (Status status = plan.forward(args); !status.ok()) return status;
    const GuardedBytes backward(plan.backward_workspace_bytes(), Guard::kEnd, 0xff);
    BackwardArgs back = call_.backward;
    back.forward = args;
    back.forward.workspace = backward.data(), back.forward.workspace_bytes = backward.size();
    return plan.backward(back);
  }

  // Bytes of all outputs.
  std::string results() const {
    const BackwardArgs& b = call_.backward;
    std::string all;
    for (const Tensor* t :
         {&b.forward.out, &b.forward.logsumexp, &b.grad_query, &b.grad_key, &b.grad_value, &b.grad_attn_bias}) {
      if (t->given()) all.append(static_cast<const char*>(t->data), static_cast<size_t>(t->num_elements()) * 4);
    }
    return all;
  }

 private:
  static void fill(const Tensor& t, int seed) {
    auto* data = static_cast<float*>(t.data);
    for (int64_t i = 0; i < t.num_elements(); ++i) {
      data[i] = static_cast<float>((i * 7919 + seed * 104729) % 2048) / 1024 - 1;
    }
  }
  BackwardCall call_;
};

AttentionDesc desc_of(int64_t batch, int64_t queries, int64_t keys, int64_t heads, int64_t dim) {
  AttentionDesc desc;
  desc.batch = batch, desc.seqlen_q = queries, desc.seqlen_k = keys, desc.num_heads = desc.num_heads_kv = heads;
  desc.head_dim = desc.head_dim_v = dim;
  return desc;
}

// Problems of every path: tiles, few queries, tiny heads, whole heads and chunks of keys in backward, a bias's gradient.
std::vector<AttentionDesc> problems() {
  std::vector<AttentionDesc> all = {desc_of(1, 70, 300, 1, 24), desc_of(2, 3, 1100, 2, 16), desc_of(40, 4, 5, 8, 8),
                                    desc_of(3, 50, 40, 8, 16)};
  all.push_back(desc_of(2, 33, 600, 2, 16));
  all.back().attn_bias = operand(DType::kFloat32, 1, 2, 1, 600);
  return all;
}

TEST(Threads, APlanRunsOnAsManyAsItWasMadeFor) {
  for (const Kernel* kernel : kernels_to_test()) {
    for (const AttentionDesc& desc : problems()) {
      if (!kernel->why_not(desc).empty()) continue;
      Elastic one;
      const Result<Plan> alone = plan(desc, {kernel->name, {.executor = &one}});
      ASSERT_TRUE(alone.ok()) << alone.status().message();
      GuardedCall expected(desc);
      ASSERT_TRUE(expected.run(*alone, {}).ok());
      for (const int planned : {1, 2, 5}) {
        Elastic threads;
        threads.threads = planned;
        const Result<Plan> made = plan(desc, {kernel->name, {.executor = &threads}});
        ASSERT_TRUE(made.ok()) << made.status().message();
        for (const int now : {1, 3, 64, 1 << 20}) {
          threads.threads = now;
          GuardedCall call(desc);
          const Status status = call.run(*made, {});
          ASSERT_TRUE(status.ok()) << status.message();
          EXPECT_LE(threads.most, planned);
          EXPECT_EQ(call.results(), expected.results())
              << kernel->name << ", planned for " << planned << ", has " << now;
        }
      }
    }
  }
}

TEST(Threads, AProductRunsOnAsManyAsItWasMadeFor) {
  MatrixProductDesc desc;
  desc.m = 90, desc.n = 200, desc.k = 4000;
  const std::vector<float> a(static_cast<size_t>(desc.m * desc.k), 0.5f),
      b(static_cast<size_t>(desc.k * desc.n), 0.25f);
  for (const Kernel* kernel : kernels_to_test()) {
    for (const int planned : {1, 3}) {
      Elastic threads;
      threads.threads = planned;
      const Result<MatrixProduct> made = matrix_product(desc, {kernel->name, {.executor = &threads}});
      if (refused(made.status())) continue;
      ASSERT_TRUE(made.ok()) << made.status().message();
      threads.threads = 64;
      std::vector<float> c(static_cast<size_t>(desc.m * desc.n));
      const GuardedBytes workspace(made->workspace_bytes(), Guard::kEnd, 0xff);
      MatrixProductArgs args;
      args.a = Tensor(a.data(), DType::kFloat32, {desc.m, desc.k});
      args.b = Tensor(b.data(), DType::kFloat32, {desc.k, desc.n});
      args.c = Tensor(c.data(), DType::kFloat32, {desc.m, desc.n});
      args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
      const Status status = made->forward(args);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_LE(threads.most, planned);
      for (const float x : c) ASSERT_EQ(x, 500);
    }
  }
}

TEST(Where, ACallMayBringItsOwnThreads) {
  const AttentionDesc desc = desc_of(3, 50, 40, 8, 16);
  Elastic planned, own;
  planned.threads = 4;
  const Result<Plan> made = plan(desc, {.kernel = {}, .where = {.executor = &planned}});
  ASSERT_TRUE(made.ok());
  GuardedCall call(desc);
  ASSERT_TRUE(call.run(*made, {.executor = &own}).ok());
  EXPECT_EQ(planned.most, 0);
  EXPECT_EQ(own.most, std::string(made->kernel_name()) == "reference" ? 0 : 4);
}

TEST(Where, WhatDoesNotFitThePlanIsRefused) {
  const AttentionDesc desc = good_desc();
  const Result<Plan> made = plan(desc);
  ASSERT_TRUE(made.ok());
  BackwardCall call(desc);
  call.reserve(*made);
  const auto refused = [&](const Where& where) {
    call.args.where = call.backward.forward.where = where;
    const Status forward = made->forward(call.args), backward = made->backward(call.backward);
    EXPECT_TRUE(call.outputs_untouched());
    EXPECT_EQ(forward.message(), backward.message());
    return forward.message();
  };
  int stream = 0;
  EXPECT_EQ(refused({.device = Device::kCuda}), "where.device is cuda, the plan was made for cpu");
  EXPECT_EQ(refused({.device = Device{7}}), "where.device is an unknown device, the plan was made for cpu");
  EXPECT_EQ(refused({.stream = &stream}), "stream is given, but the CPU has no streams");
  EXPECT_EQ(plan(desc, {.kernel = {}, .where = {.stream = &stream}}).status().message(),
            "stream is given, but the CPU has no streams");
  AttentionDesc float64 = desc;  // which no kernel for CUDA takes
  float64.dtype = DType::kFloat64;
  const Status elsewhere = plan(float64, {.kernel = {}, .where = {.device = Device::kCuda}}).status();
  EXPECT_EQ(elsewhere.code(), StatusCode::kUnsupported);
  const bool has_cuda = cuda_machine().runtime_version != 0;
  const std::string none = "device is cuda, this build has no kernel for it";
  EXPECT_EQ(elsewhere.message().find(has_cuda ? "no kernel can compute this: cuda_sm80 (" : none.c_str()), 0u)
      << elsewhere.message();
  // Products and blocks say the same, on a machine without a GPU; a layer may say first what attention there lacks.
  int stream_of_a_gpu = 0;
  MatrixProductDesc product;
  FeedForwardBlockDesc block;
  LayerDesc layer_desc;
  for (const Where& where : {Where{.device = Device::kCuda}, Where{.stream = &stream_of_a_gpu}}) {
    if (where.device && cuda_machine().why_not.empty()) continue;
    const std::string expected = plan(desc, {.kernel = {}, .where = where}).status().message();
    EXPECT_EQ(matrix_product(product, {.kernel = {}, .where = where}).status().message(), expected);
    EXPECT_EQ(feed_forward_block(block, {.kernel = {}, .where = where}).status().message(), expected);
    const Status of_layer = layer(layer_desc, {.kernel = {}, .where = where}).status();
    EXPECT_EQ(of_layer.code(), where.device ? StatusCode::kUnsupported : StatusCode::kInvalidArgument);
    if (!has_cuda) {
      EXPECT_EQ(of_layer.message(), expected);
    }
  }
  call.args.where = {.device = Device::kCpu};
  EXPECT_TRUE(made->forward(call.args).ok());
}

TEST(Unchecked, ComputesWhatTheCheckedCallDoes) {
  for (AttentionDesc desc : {desc_of(2, 20, 30, 2, 8), desc_of(2, 0, 3, 2, 8)}) {
    const Result<Plan> made = plan(desc);
    ASSERT_TRUE(made.ok());
    BackwardCall checked(desc), unchecked(desc);
    checked.reserve(*made);
    unchecked.reserve(*made);
    ASSERT_TRUE(made->forward(checked.args).ok());
    ASSERT_TRUE(made->backward(checked.backward).ok());
    unchecked.args.where.device = unchecked.backward.forward.where.device = Device::kCuda;  // nobody looks
    ASSERT_TRUE(forward_unchecked(*made, unchecked.args).ok());
    ASSERT_TRUE(backward_unchecked(*made, unchecked.backward).ok());
    const auto same = [](const Tensor& a, const Tensor& b) {
      return std::memcmp(a.data, b.data, static_cast<size_t>(a.num_elements()) * 4) == 0;
    };
    EXPECT_TRUE(same(checked.args.out, unchecked.args.out));
    EXPECT_TRUE(same(checked.args.logsumexp, unchecked.args.logsumexp));
    EXPECT_TRUE(same(checked.backward.grad_query, unchecked.backward.grad_query));
    EXPECT_TRUE(same(checked.backward.grad_value, unchecked.backward.grad_value));
  }
}

}  // namespace
}  // namespace polyhead::testing
