// A program in a layer and in a block gives what the built-in options of the same meaning give, forward and backward, the
// gradients of what it captures included, on every kernel that has products.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "contract/linear.h"
#include "kernels_to_test.h"
#include "left_out.h"
#include "polyhead/block.h"
#include "testing/array.h"
#include "testing/random.h"

namespace polyhead::testing {
namespace {

constexpr int64_t kBatch = 2, kBeam = 2, kSteps = 19, kSize = 24, kHeads = 4, kDim = 8;
constexpr const char* kText = "shown: bool; score = score - slope[h] * abs(q - k); mask = k <= q and shown[b, k]";

// Self-attention with ALiBi, causal and a mask of keys, by options or by a program.
struct Trained {
  LayerDesc desc;
  Array x, slope, shown, grad_out, out, grad_x, grad_slope;
  std::vector<char> weights, grad_weights;
  std::vector<Tensor> captures, grad_captures;
  Status status;

  explicit Trained(bool by_program) {
    Random random(3);
    desc.batch = kBatch, desc.beam = desc.beam_kv = kBeam, desc.seqlen_q = desc.seqlen_k = kSteps;
    desc.num_heads = kHeads, desc.num_heads_kv = 2;
    desc.query_size = desc.key_size = desc.value_size = desc.out_proj_size = kSize;
    desc.query_proj_size = desc.key_proj_size = desc.value_proj_size = kDim;
    const auto drawn = [&](DType dtype, std::vector<int64_t> dims, auto draw) {
      Array a(dtype, std::move(dims));
      a.fill(draw);
      return a;
    };
    const auto normal = [&] { return random.normal(); };
    x = drawn(DType::kFloat32, {kBatch, kBeam, kSteps, kSize}, normal);
    grad_out = drawn(DType::kFloat32, x.dims, normal);
    slope = drawn(DType::kFloat32, {kHeads}, [&] { return 0.3 * random.uniform(); });
    shown = drawn(DType::kBool, {kBatch, 1, 1, kSteps}, [&] { return random.integer(0, 4) != 0; });
    out = grad_x = Array(DType::kFloat32, x.dims);
    grad_slope = Array(DType::kFloat32, slope.dims);
    AttentionDesc& attention = desc.attention;
    if (!by_program) {
      attention.causal = true;
      attention.alibi_slopes_ndim = 1;
      attention.attn_mask = {true, DType::kBool, {kBatch, 1, 1, kSteps}};
      return;
    }
    attention.program = *parse_program(kText);
    attention.captures = {{DType::kBool, 2, {kBatch, kSteps}}, {DType::kFloat32, 1, {kHeads}}};
    captures = {Tensor(view(shown).data, DType::kBool, {kBatch, kSteps}), view(slope)};
    grad_captures = {Tensor(), view(grad_slope)};
  }

  void give_options(LayerForwardArgs& args) {
    if (desc.attention.program != nullptr) {
      args.captures = captures;
    } else {
      args.attn_mask = view(shown);
      args.alibi_slopes = view(slope);
    }
  }
  template <class Args>
  void give_gradients(Args& args) {
    args.grad_out = view(grad_out);
    args.grad_query = view(grad_x);
    if (desc.attention.program != nullptr) {
      args.grad_captures = grad_captures;
    } else {
      args.grad_alibi_slopes = view(grad_slope);
    }
  }
  // A buffer of the layer's weights, the same numbers for the same layer.
  LayerWeights drawn_weights(const Layer& layer) {
    weights.resize(layer.weights_bytes()), grad_weights.resize(layer.weights_bytes());
    Random random(5);
    auto* numbers = reinterpret_cast<float*>(weights.data());
    for (size_t n = 0; n < weights.size() / sizeof(float); ++n) numbers[n] = static_cast<float>(0.2 * random.normal());
    return layer.weights_in(weights.data());
  }
};

struct Memory64 {
  std::vector<char> bytes;
  explicit Memory64(size_t count) : bytes(count + 64) {}
  void* data() { return bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64; }
};

void run_layer(Trained& t, const PlanOptions& options) {
  const Result<Layer> made = layer(t.desc, options);
  ASSERT_TRUE(made.ok()) << made.status().message();
  Memory64 reserve(made->reserve_bytes());
  Memory64 workspace(std::max(made->workspace_bytes(), made->backward_workspace_bytes()));
  LayerBackwardArgs args;
  LayerForwardArgs& f = args.forward;
  f.query = f.key = f.value = view(t.x);
  f.weights = t.drawn_weights(*made);
  f.out = view(t.out);
  f.reserve = reserve.data(), f.reserve_bytes = made->reserve_bytes();
  f.workspace = workspace.data(), f.workspace_bytes = workspace.bytes.size() - 64;
  t.give_options(f);
  t.status = made->forward(f);
  if (!t.status.ok()) return;
  t.give_gradients(args);
  args.grad_key = args.grad_value = args.grad_query;
  args.grad_weights = made->weights_in(t.grad_weights.data());
  t.status = made->backward_data(args);
  if (t.status.ok()) t.status = made->backward_weights(args);
}

void run_block(Trained& t, const PlanOptions& options) {
  AttentionBlockDesc desc;
  desc.layer = t.desc;
  desc.layer.residual = true;
  desc.norm.kind = NormKind::kRmsNorm;
  desc.norm.gamma = desc.norm.beta = false;
  const Result<AttentionBlock> made = attention_block(desc, options);
  ASSERT_TRUE(made.ok()) << made.status().message();
  Memory64 reserve(made->reserve_bytes());
  Memory64 workspace(std::max(made->workspace_bytes(), made->backward_workspace_bytes()));
  AttentionBlockBackwardArgs args;
  LayerForwardArgs& f = args.forward.layer;
  f.query = view(t.x);
  f.weights = t.drawn_weights(made->layer());
  f.out = view(t.out);
  f.reserve = reserve.data(), f.reserve_bytes = made->reserve_bytes();
  f.workspace = workspace.data(), f.workspace_bytes = workspace.bytes.size() - 64;
  t.give_options(f);
  t.status = made->forward(args.forward);
  if (!t.status.ok()) return;
  t.give_gradients(args);
  args.grad_weights = made->layer().weights_in(t.grad_weights.data());
  t.status = made->backward(args);
}

void expect_close(const Array& a, const Array& b, const char* what) {
  double worst = 0;
  for (int64_t n = 0; n < a.size(); ++n) worst = std::max(worst, std::fabs(a.at(n) - b.at(n)));
  EXPECT_LT(worst, 1e-4) << what;
}

using RunOne = void (*)(Trained&, const PlanOptions&);

void expect_same(RunOne run) {
  for (const Kernel* kernel : kernels_to_test()) {
    SCOPED_TRACE(kernel->name);
    const PlanOptions options{.kernel = kernel->name};
    Trained program(true), built_in(false);
    if (refuses(kernel->name, linear::find_kernel(kernel->name)->why_not(program.desc.dtype))) continue;
    run(program, options);
    run(built_in, options);
    ASSERT_EQ(program.status.message(), "");
    ASSERT_EQ(built_in.status.message(), "");
    expect_close(program.out, built_in.out, "out");
    expect_close(program.grad_x, built_in.grad_x, "grad_query");
    expect_close(program.grad_slope, built_in.grad_slope, "gradient of slope");
    EXPECT_NE(program.grad_slope.at(0), 0);
    const auto* a = reinterpret_cast<const float*>(program.grad_weights.data());
    const auto* b = reinterpret_cast<const float*>(built_in.grad_weights.data());
    for (size_t n = 0; n < program.grad_weights.size() / sizeof(float); ++n) ASSERT_NEAR(a[n], b[n], 1e-3) << n;
  }
}

TEST(LayerProgram, IsWhatTheOptionsAre) { expect_same(run_layer); }
TEST(LayerProgram, InABlock) { expect_same(run_block); }

TEST(LayerProgram, Refused) {
  const auto refused = [](auto spoil) {
    Trained t(true);
    spoil(t);
    run_layer(t, {});
    EXPECT_EQ(t.out.at(0), 0) << "out is untouched";
    return t.status.message();
  };
  EXPECT_EQ(refused([](Trained& t) { t.captures.pop_back(); }), "slope is missing");
  EXPECT_EQ(refused([](Trained& t) { t.captures.push_back(t.captures[1]); }),
            "captures has 3 tensors, the program captures 2");
  EXPECT_EQ(
      refused([](Trained& t) {
        t.desc.attention.captures[1].dims[0] = 3;
        t.captures[1].dims[0] = 3;
      }),
      "program: element [3] of slope [3] is asked for at batch 0, head 3, query 0, key 0, which lies outside; hide "
      "the pair or clamp the index");
  Trained t(true);
  t.grad_captures[0] = t.captures[0];
  run_layer(t, {});
  EXPECT_EQ(t.status.message(), "grad_captures[0] is given, but that capture holds no floats");
}

// Time step `step` of [batch, beam, time, size].
Tensor time_step(const Array& a, int64_t step) {
  Tensor t = view(a);
  t.data = static_cast<char*>(t.data) + step * t.strides[2] * static_cast<int64_t>(sizeof(float));
  t.dims[2] = 1;
  return t;
}

// All steps at once, then one by one: each puts its key and value into the caches, or they stand as the first call left
// them.
void run_steps(Trained& t, const PlanOptions& options, bool append, Array& by_steps) {
  const Result<Layer> made = layer(t.desc, options);
  ASSERT_TRUE(made.ok()) << made.status().message();
  Memory64 workspace(made->workspace_bytes());
  Array keys(DType::kFloat32, {kBatch, kBeam, kSteps, 2, kDim}), values = keys;
  LayerForwardArgs f;
  f.query = f.key = f.value = view(t.x);
  f.weights = t.drawn_weights(*made);
  f.out = view(t.out);
  f.workspace = workspace.data(), f.workspace_bytes = made->workspace_bytes();
  t.give_options(f);
  if (!append) f.key_cache = view(keys), f.value_cache = view(values);
  ASSERT_EQ(made->forward(f).message(), "");
  f.key_cache = view(keys), f.value_cache = view(values);
  for (f.step = 0; f.step < kSteps; ++f.step) {
    f.query = time_step(t.x, f.step);
    f.key = f.value = append ? f.query : Tensor();
    f.out = time_step(by_steps, f.step);
    ASSERT_EQ(made->forward(f).message(), "") << "step " << f.step;
  }
}

TEST(LayerProgram, StepsGiveWhatTheWholeGives) {
  for (const Kernel* kernel : kernels_to_test()) {
    for (const bool append : {true, false}) {
      SCOPED_TRACE(std::string(kernel->name) + (append ? ", with caches that grow" : ", with caches that stand"));
      Trained t(true);
      if (refuses(kernel->name, linear::find_kernel(kernel->name)->why_not(t.desc.dtype))) continue;
      if (!append) {
        t.desc.attention.query_offset = 3;
        t.desc.attention.program = *parse_program(
            "shown: bool; first = 2 * slope[q % 4] + slope[h]; score = score + first * abs(k - q - offset); "
            "mask = shown[b, k] or k == q or q - k > 3 * offset");
      }
      Array by_steps(DType::kFloat32, t.x.dims);
      run_steps(t, {.kernel = kernel->name}, append, by_steps);
      expect_close(by_steps, t.out, "out");
      EXPECT_NE(by_steps.at(by_steps.size() - 1), 0);
    }
  }
}

TEST(LayerProgram, IndicesOfAStepStayWithin) {
  Trained t(true);
  t.desc.attention.program = *parse_program("shown: bool; score = score + slope[q]; mask = shown[b, k]");
  const Result<Layer> made = layer(t.desc);
  ASSERT_TRUE(made.ok()) << made.status().message();
  Memory64 workspace(made->workspace_bytes());
  Array keys(DType::kFloat32, {kBatch, kBeam, kSteps, 2, kDim}), values = keys, out(DType::kFloat32, t.x.dims);
  LayerForwardArgs f;
  f.weights = t.drawn_weights(*made);
  f.key_cache = view(keys), f.value_cache = view(values);
  f.workspace = workspace.data(), f.workspace_bytes = made->workspace_bytes();
  t.give_options(f);
  for (f.step = kHeads - 1; f.step <= kHeads; ++f.step) {
    f.query = f.key = f.value = time_step(t.x, f.step);
    f.out = time_step(out, f.step);
    const std::string message = made->forward(f).message();
    if (f.step == kHeads - 1) {
      EXPECT_EQ(message, "");
      continue;
    }
    EXPECT_EQ(message,
              "program: element [4] of slope [4] is asked for at batch 0, head 0, query 0, key 0, which lies outside; "
              "hide the pair or clamp the index");
    EXPECT_EQ(keys.at(kHeads * 2 * kDim), 0) << "the caches are untouched";
  }
}

// The number of the step is one more tensor that the program captures.
TEST(LayerProgram, OfEightTensorsTakesNoSingleSteps) {
  Trained t(true);
  std::string text = "score = score + slope[h]";
  AttentionDesc& attention = t.desc.attention;
  attention.captures = {{DType::kFloat32, 1, {kHeads}}};
  t.captures = {view(t.slope)};
  for (int n = 1; n < Program::kMostCaptures; ++n) {
    text += " + q * t" + std::to_string(n) + "[h]";
    attention.captures.push_back(attention.captures[0]);
    t.captures.push_back(t.captures[0]);
  }
  attention.program = *parse_program(text);
  const Result<Layer> made = layer(t.desc);
  ASSERT_TRUE(made.ok()) << made.status().message();
  Memory64 workspace(made->workspace_bytes());
  Array keys(DType::kFloat32, {kBatch, kBeam, kSteps, 2, kDim}), values = keys;
  LayerForwardArgs f;
  f.weights = t.drawn_weights(*made);
  f.key_cache = view(keys), f.value_cache = view(values);
  f.workspace = workspace.data(), f.workspace_bytes = made->workspace_bytes();
  f.captures = t.captures;
  f.step = 3;
  f.query = f.key = f.value = time_step(t.x, f.step);
  f.out = time_step(t.out, f.step);
  EXPECT_EQ(made->forward(f).message(),
            "step is 3: a program that captures 8 tensors takes no single steps, one of 7 would");
}

}  // namespace
}  // namespace polyhead::testing
