// What layers, blocks and products do on a device: nothing of it is looked at by the host (device_of_test.h ends the
// process, if it is), what does not lie there is refused before anything is computed, errors of a step are handed on.
#include <gtest/gtest.h>

#include <functional>

#include "device_of_test.h"
#include "layer_block.h"
#include "polyhead/layer.h"
#include "polyhead/matrix_product.h"
#include "through_c.h"

namespace polyhead::testing {
namespace {

constexpr const char* kDevice = "cuda_of_test";

LayerDesc small_layer() {
  LayerDesc desc;
  desc.seqlen_q = 4, desc.seqlen_k = 4;
  desc.num_heads = 2, desc.num_heads_kv = 1;
  desc.query_size = desc.key_size = desc.value_size = 6;
  desc.query_proj_size = desc.key_proj_size = desc.value_proj_size = 3;
  desc.out_proj_size = 6;
  desc.attention.has_seqlens_q = desc.attention.has_seqlens_k = true;
  return desc;
}

PlanOptions on_this_device() { return options_of(kDevice, 1); }

Array numbers(std::vector<int64_t> dims, DType dtype = DType::kFloat32) {
  Random random(5);
  return random_array(random, dtype, std::move(dims), 0, 1);
}

// A layer's training call on arrays of its own.
struct TrainingCall {
  Layer layer;
  Array x, out, grad_out, grad_x, lengths;
  std::vector<uint8_t> weights, grad_weights;
  Memory workspace, backward_workspace, reserve;
  LentArrays lent{kDevice};
  std::unique_ptr<Loan> loan = new_loan(kDevice);
  LayerForwardArgs forward;
  LayerBackwardArgs backward;

  explicit TrainingCall(const Layer& made)
      : layer(made),
        x(numbers({1, 1, 4, 6})),
        out(x),
        grad_out(x),
        grad_x(x),
        lengths(DType::kInt32, {1, 1}),
        weights(made.weights_bytes(), 0),
        grad_weights(made.weights_bytes(), 0),
        workspace(made.workspace_bytes()),
        backward_workspace(made.backward_workspace_bytes()),
        reserve(made.reserve_bytes()) {
    lengths.set(0, 3);
    forward.query = forward.key = forward.value = lent.in(x);
    forward.seqlens_q = forward.seqlens_k = lent.in(lengths);
    forward.weights = layer.weights_in(loan->lend(weights.data(), weights.size(), true));
    forward.out = lent.out(out);
    forward.workspace = lent.memory(workspace), forward.workspace_bytes = made.workspace_bytes();
    forward.reserve = lent.memory(reserve), forward.reserve_bytes = made.reserve_bytes();
    backward.forward = forward;
    backward.forward.out = {};
    backward.forward.workspace = lent.memory(backward_workspace);
    backward.forward.workspace_bytes = made.backward_workspace_bytes();
    backward.grad_out = lent.in(grad_out);
    backward.grad_query = backward.grad_key = backward.grad_value = lent.out(grad_x);
    backward.grad_weights = layer.weights_in(loan->lend(grad_weights.data(), grad_weights.size(), true));
  }

  std::string all() const {
    if (Status status = layer.forward(forward); !status.ok()) return status.message();
    if (Status status = layer.backward_data(backward); !status.ok()) return status.message();
    return layer.backward_weights(backward).message();
  }
};

Layer made_layer() {
  const Result<Layer> made = layer(small_layer(), on_this_device());
  EXPECT_TRUE(made.ok()) << made.status().message();
  return *made;
}

// Forward and both backward calls, in all layouts.
TEST(LayerOnDevice, AllGiveTheBitsOfTheReference) {
  int num_run = 0;
  for (LayerProblem problem : layer_problems()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      problem.desc.dtype = dtype;
      SCOPED_TRACE(problem.name + " " + dtype_name(dtype));
      const LayerInputs in = random_inputs(problem);
      for (const bool training : {true, false}) {
        LayerRun here{.kernel = "reference", .layout_seed = problem.seed, .training = training}, there = here;
        there.kernel = kDevice;
        EXPECT_EQ(difference(run(problem, in, there), run(problem, in, here)), "");
        ++num_run;
      }
    }
  }
  EXPECT_GT(num_run, 100);
}

// Single steps, whose place among the keys the device finds out, with keys that stand or join.
TEST(LayerOnDevice, StepsGiveTheBitsOfTheReference) {
  int num_run = 0;
  for (LayerProblem problem : layer_problems()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      problem.desc.dtype = dtype;
      SCOPED_TRACE(problem.name + " " + dtype_name(dtype));
      const LayerInputs in = random_inputs(problem);
      for (const bool append : {false, true}) {
        if (append && problem.desc.seqlen_q > problem.desc.seqlen_k) continue;
        const LayerRun here{.kernel = "reference", .layout_seed = problem.seed}, there{.kernel = kDevice};
        const LayerResults want = run_steps(inference(problem), in, here, append);
        EXPECT_EQ(difference(run_steps(inference(problem), in, there, append), want), "");
        ++num_run;
      }
    }
  }
  EXPECT_GT(num_run, 60);
}

TEST(LayerOnDevice, TakesItsKernelsAndTellsWhereWeightsLie) {
  const Layer made = made_layer();
  EXPECT_STREQ(made.kernel_name(), kDevice);
  EXPECT_EQ(made.weights_in(nullptr).query.device, Device::kCuda);
}

TEST(LayerOnDevice, RefusesMemoryOfTheHost) {
  TrainingCall call(made_layer());
  Array host = numbers({64});
  alignas(64) static char memory[1 << 16];
  const auto refused_forward = [&](const char* name, const std::function<void(LayerForwardArgs&)>& change) {
    LayerForwardArgs args = call.forward;
    change(args);
    EXPECT_EQ(call.layer.forward(args).message(), std::string(name) + " lies in the host's memory");
  };
  take_calls();
  refused_forward("query", [&](auto& args) { args.query.data = host.bytes.data(); });
  refused_forward("weights.out", [&](auto& args) { args.weights.out.data = host.bytes.data(); });
  refused_forward("seqlens_k", [&](auto& args) { args.seqlens_k.data = host.bytes.data(); });
  refused_forward("out", [&](auto& args) { args.out.data = host.bytes.data(); });
  refused_forward("reserve", [&](auto& args) { args.reserve = memory; });
  refused_forward("workspace", [&](auto& args) { args.workspace = memory; });
  refused_forward("prepacked_weights", [&](auto& args) {
    args.prepacked_weights = memory, args.prepacked_weights_bytes = call.layer.prepacked_weights_bytes();
  });
  LayerBackwardArgs backward = call.backward;
  backward.grad_out.data = host.bytes.data();
  EXPECT_EQ(call.layer.backward_data(backward).message(), "grad_out lies in the host's memory");
  backward = call.backward;
  backward.grad_weights.query.data = host.bytes.data();
  EXPECT_EQ(call.layer.backward_weights(backward).message(), "grad_weights.query lies in the host's memory");
  LayerForwardArgs args = call.forward;
  args.query.device = Device::kCpu;
  EXPECT_EQ(call.layer.forward(args).message(), "query is not on cuda, where this call computes");
  args = call.forward;
  args.where.device = Device::kCpu;
  EXPECT_EQ(call.layer.forward(args).message(), "where.device is cpu, the plan was made for cuda");
  args = call.forward;
  args.where.stream = memory;
  EXPECT_EQ(call.layer.forward(args).message(), "stream is not a stream of CUDA here");
  EXPECT_EQ(call.layer.prepack_weights(call.forward.weights, memory, sizeof memory).message(),
            "prepacked_weights lies in the host's memory");
  EXPECT_EQ(take_calls(), 0);
}

TEST(LayerOnDevice, RunsOnTheStreamOfTheCall) {
  PlanOptions without = on_this_device();
  without.where.stream = nullptr;
  const Result<Layer> made = layer(small_layer(), without);
  ASSERT_TRUE(made.ok()) << made.status().message();
  TrainingCall call(*made);
  EXPECT_EQ(call.all(), "stream is not a stream of CUDA here");
  call.forward.where.stream = call.backward.forward.where.stream = stream_of_test();
  EXPECT_EQ(call.all(), "");
}

TEST(LayerOnDevice, ThroughC) {
  PlanOptions without = on_this_device();
  without.where.stream = nullptr;
  const Layer made = made_layer();
  const LayerThroughC through(small_layer(), without);
  ASSERT_TRUE(through.made.ok()) << through.made.message();
  EXPECT_STREQ(polyhead_layer_kernel_name(through.layer), kDevice);
  TrainingCall by_c(made), call(made);
  EXPECT_EQ(through.forward(by_c.forward).message(), "stream is not a stream of CUDA here");
  by_c.forward.where.stream = by_c.backward.forward.where.stream = stream_of_test();
  EXPECT_EQ(through.forward(by_c.forward).message(), "");
  EXPECT_EQ(through.backward_data(by_c.backward).message(), "");
  EXPECT_EQ(through.backward_weights(by_c.backward).message(), "");
  ASSERT_EQ(call.all(), "");
  for (TrainingCall* each : {&by_c, &call}) each->lent.finish();
  for (TrainingCall* each : {&by_c, &call}) EXPECT_EQ(each->loan->finish(), "");
  EXPECT_EQ(difference("out", by_c.out, call.out), "");
  EXPECT_EQ(difference("grad_x", by_c.grad_x, call.grad_x), "");
  EXPECT_EQ(by_c.grad_weights, call.grad_weights);
  polyhead_layer_weights weights;
  ASSERT_EQ(polyhead_layer_weights_in(through.layer, stream_of_test(), made.weights_bytes(), &weights), POLYHEAD_OK);
  EXPECT_EQ(weights.tensors[POLYHEAD_QUERY_WEIGHT].device, POLYHEAD_CUDA);
}

TEST(LayerOnDevice, HandsOnTheErrorOfEachStep) {
  TrainingCall call(made_layer());
  take_calls();
  ASSERT_EQ(call.all(), "");
  const int calls = take_calls();
  ASSERT_GE(calls, 10);
  for (int i = 0; i < calls; ++i) {
    fail_call(i);
    EXPECT_EQ(call.all(), "the device of the test fails") << i;
  }
  fail_call(-1);
  ASSERT_EQ(call.all(), "");
}

TEST(LayerOnDevice, DropoutNeedsSeedsInBothDirections) {
  LayerDesc desc = small_layer();
  desc.output_dropout_p = 0.5;
  const Result<Layer> made = layer(desc, on_this_device());
  ASSERT_TRUE(made.ok());
  TrainingCall call(*made);
  const char* const missing = "output_dropout_seed is not given, must be where output_dropout_p is 0.5";
  EXPECT_EQ(call.all(), missing);
  call.forward.output_dropout_seed = 3;
  EXPECT_EQ(call.all(), missing);
  call.backward.forward.output_dropout_seed = 3;
  EXPECT_EQ(call.all(), "");
}

// What dtype, kernel and device make of a product with a norm: on the host and there.
Array product_on(const std::string& kernel, bool prepacked) {
  MatrixProductDesc desc;
  desc.m = 5, desc.n = 7, desc.k = 9;
  desc.bias = desc.residual = true, desc.prepacked = prepacked;
  desc.activation = ActivationKind::kGelu, desc.norm = NormKind::kLayerNorm;
  const Result<MatrixProduct> product = matrix_product(desc, options_of(kernel, 1));
  EXPECT_TRUE(product.ok()) << product.status().message();
  const Array a = numbers({5, 9}), b = numbers({9, 7}), bias = numbers({7}), residual = numbers({5, 7});
  Array c(DType::kFloat32, {5, 7}), sum = c;
  const Memory workspace(product->workspace_bytes() + 64), packed(product->prepacked_bytes() + 64);
  LentArrays lent(kernel);
  MatrixProductArgs args;
  args.a = lent.in(a), args.b = lent.in(b), args.bias = lent.in(bias), args.residual = lent.in(residual);
  args.c = lent.out(c), args.sum = lent.out(sum);
  args.workspace = lent.memory(workspace), args.workspace_bytes = product->workspace_bytes();
  if (prepacked) {
    void* const to = lent.memory(packed);
    EXPECT_EQ(product->prepack(args.b, to, product->prepacked_bytes()).message(), "");
    args.prepacked = to, args.prepacked_bytes = product->prepacked_bytes();
    args.b = {};
  }
  EXPECT_EQ(product->forward(args).message(), "");
  lent.finish();
  return c;
}

TEST(MatrixProductOnDevice, GivesTheHostsNumbers) {
  for (const bool prepacked : {false, true}) {
    SCOPED_TRACE(prepacked);
    expect_near(product_on(kDevice, prepacked), product_on("", prepacked), 1e-6, "c");
  }
}

TEST(MatrixProductOnDevice, RefusesMemoryOfTheHost) {
  MatrixProductDesc desc;
  desc.m = desc.n = desc.k = 2;
  const Result<MatrixProduct> product = matrix_product(desc, on_this_device());
  ASSERT_TRUE(product.ok()) << product.status().message();
  const Array a = numbers({2, 2});
  Array c = a;
  MatrixProductArgs args;
  args.a = args.b = view(a), args.c = view(c);
  EXPECT_EQ(product->forward(args).message(), "a is not on cuda, where this call computes");
  for (Tensor* t : {&args.a, &args.b, &args.c}) t->device = Device::kCuda;
  EXPECT_EQ(product->forward(args).message(), "a lies in the host's memory");
  alignas(64) char packed[4096];
  EXPECT_EQ(product->prepack(args.b, packed, sizeof packed).message(), "b lies in the host's memory");
}

TEST(FeedForwardBlockOnDevice, RefusesMemoryOfTheHostAndReadsPrepackedWeights) {
  FeedForwardBlockDesc desc;
  desc.seqlen = 3, desc.size = 4, desc.inner_size = 8;
  desc.bias1 = desc.bias2 = false, desc.norm.kind = NormKind::kNone;
  const Result<FeedForwardBlock> block = feed_forward_block(desc, on_this_device());
  ASSERT_TRUE(block.ok()) << block.status().message();
  EXPECT_STREQ(block->kernel_name(), kDevice);
  const Array x = numbers({1, 3, 4}), w1 = numbers({4, 8}), w2 = numbers({8, 4});
  Array out = x, from_packed = x;
  const Memory workspace(block->workspace_bytes()), packed(block->prepacked_weights_bytes());
  LentArrays lent(kDevice);
  FeedForwardBlockForwardArgs args;
  args.x = lent.in(x), args.out = lent.out(out);
  args.weights.weight1 = lent.in(w1), args.weights.weight2 = lent.in(w2);
  args.workspace = lent.memory(workspace), args.workspace_bytes = block->workspace_bytes();
  FeedForwardBlockForwardArgs wrong = args;
  wrong.x = view(x), wrong.x.device = Device::kCuda;
  EXPECT_EQ(block->forward(wrong).message(), "x lies in the host's memory");
  ASSERT_EQ(block->forward(args).message(), "");
  void* const to = lent.memory(packed);
  ASSERT_EQ(block->prepack_weights(args.weights, to, block->prepacked_weights_bytes()).message(), "");
  args.prepacked_weights = to, args.prepacked_weights_bytes = block->prepacked_weights_bytes();
  args.weights = {};
  args.out = lent.out(from_packed);
  ASSERT_EQ(block->forward(args).message(), "");
  lent.finish();
  EXPECT_EQ(difference("out", from_packed, out), "");
  EXPECT_NE(difference("out", out, x), "");
}

}  // namespace
}  // namespace polyhead::testing
