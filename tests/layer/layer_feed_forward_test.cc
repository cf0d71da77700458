// Feed-forward blocks: as layer_block.h says.
#include "activated.h"
#include "layer_block.h"
#include "polyhead/dropout.h"

namespace polyhead::testing {
namespace {

struct FeedForwardCase {
  std::string name;
  FeedForwardBlockDesc desc;
};

std::vector<FeedForwardCase> feed_forward_cases() {
  std::vector<FeedForwardCase> cases;
  const auto add = [&](const char* name, auto change) {
    FeedForwardCase c;
    c.name = name;
    c.desc.batch = 2, c.desc.seqlen = 7, c.desc.size = 10, c.desc.inner_size = 24;
    change(c.desc);
    cases.push_back(c);
  };
  add("gelu_pre", [](auto&) {});
  add("gelu_post", [](auto& d) { d.norm.pre = false; });
  add("relu_dropouts", [](auto& d) {
    d.activation = ActivationKind::kRelu;
    d.inner_dropout_p = 0.3, d.output_dropout_p = 0.2;
  });
  add("silu_rms_no_bias", [](auto& d) {
    d.activation = ActivationKind::kSilu;
    d.norm.kind = NormKind::kRmsNorm, d.norm.beta = d.bias1 = d.bias2 = false;
  });
  add("tanh_post_dropouts", [](auto& d) {
    d.activation = ActivationKind::kGeluTanh;
    d.norm.pre = false, d.norm.gamma = false;
    d.inner_dropout_p = 0.3, d.output_dropout_p = 0.2;
  });
  add("linear_no_norm", [](auto& d) { d.activation = ActivationKind::kNone, d.norm.kind = NormKind::kNone; });
  add("no_residual", [](auto& d) { d.residual = false; });
  add("no_residual_post", [](auto& d) { d.residual = d.norm.pre = false, d.norm.kind = NormKind::kRmsNorm; });
  return cases;
}

struct FeedForwardNumbers {
  Array x, weight1, bias1, weight2, bias2, gamma, beta, grad_out;

  std::vector<std::pair<const char*, Array*>> all() {
    return {{"x", &x},         {"weight1", &weight1}, {"bias1", &bias1}, {"weight2", &weight2},
            {"bias2", &bias2}, {"gamma", &gamma},     {"beta", &beta},   {"grad_out", &grad_out}};
  }
};

FeedForwardNumbers numbers_of(const FeedForwardCase& c) {
  const FeedForwardBlockDesc& d = c.desc;
  Random random(11);
  FeedForwardNumbers in;
  in.x = random_array(random, d.dtype, {d.batch, d.seqlen, d.size}, 0.5, 1);
  in.weight1 = random_array(random, d.dtype, {d.size, d.inner_size}, 0, 0.3);
  in.weight2 = random_array(random, d.dtype, {d.inner_size, d.size}, 0, 0.2);
  if (d.bias1) in.bias1 = random_array(random, d.dtype, {d.inner_size}, 0, 0.3);
  if (d.bias2) in.bias2 = random_array(random, d.dtype, {d.size}, 0, 0.3);
  if (d.norm.kind != NormKind::kNone && d.norm.gamma) in.gamma = random_array(random, d.dtype, {d.size}, 1, 0.3);
  if (d.norm.kind != NormKind::kNone && d.norm.beta) in.beta = random_array(random, d.dtype, {d.size}, 0, 0.3);
  in.grad_out = random_array(random, d.dtype, {d.batch, d.seqlen, d.size}, 0, 1);
  return in;
}

FeedForwardNumbers numbers_in(FeedForwardNumbers in, DType dtype) {
  for (const auto& [name, array] : in.all()) *array = to_dtype(*array, dtype);
  return in;
}

constexpr uint64_t kInnerSeed = 77, kOutputSeed = 78;

Result<FeedForwardBlock> block_of(const FeedForwardCase& c, const std::string& kernel, int threads) {
  return feed_forward_block(c.desc, options_of(kernel, threads));
}

Arrays run(const FeedForwardCase& c, FeedForwardNumbers in, const std::string& kernel, int threads, bool train) {
  const Result<FeedForwardBlock> block = block_of(c, kernel, threads);
  EXPECT_TRUE(block.ok()) << block.status().message();
  const Memory workspace(block->workspace_bytes()), reserve(block->reserve_bytes());
  const Memory backward_workspace(block->backward_workspace_bytes());
  Arrays got;
  LentArrays lent(kernel);
  FeedForwardBlockForwardArgs args;
  args.x = lent.in(in.x);
  args.weights = {lent.in(in.weight1),
                  lent.in(in.bias1),
                  lent.in(in.weight2),
                  lent.in(in.bias2),
                  {lent.in(in.gamma), lent.in(in.beta)}};
  args.inner_dropout_seed = kInnerSeed, args.output_dropout_seed = kOutputSeed;
  got["out"] = unwritten(in.grad_out);
  args.out = lent.out(got["out"]);
  args.workspace = lent.memory(workspace), args.workspace_bytes = block->workspace_bytes();
  args.reserve = lent.memory(reserve), args.reserve_bytes = block->reserve_bytes();
  EXPECT_EQ(block->forward(args).message(), "");
  if (!train) return lent.finish(), got;
  FeedForwardBlockBackwardArgs backward;
  backward.forward = args;
  backward.forward.out = {};
  backward.forward.workspace = lent.memory(backward_workspace);
  backward.forward.workspace_bytes = block->backward_workspace_bytes();
  backward.grad_out = lent.in(in.grad_out);
  FeedForwardWeights& to = backward.grad_weights;
  Tensor* const tensors[] = {&backward.grad_x, &to.weight1,    &to.bias1,    &to.weight2,
                             &to.bias2,        &to.norm.gamma, &to.norm.beta};
  const auto all = in.all();
  for (size_t n = 0; n < std::size(tensors); ++n) {
    if (!all[n].second->given()) continue;
    const std::string name = std::string("grad_") + all[n].first;
    got[name] = unwritten(*all[n].second);
    *tensors[n] = lent.out(got[name]);
  }
  EXPECT_EQ(block->backward(backward).message(), "");
  lent.finish();
  return got;
}

// Dropout's factors of [batch, 1, seqlen, size], by the public function.
std::vector<double> factors(double p, uint64_t seed, const FeedForwardBlockDesc& d, int64_t size) {
  Array kept(DType::kBool, {d.batch, 1, d.seqlen, size});
  EXPECT_TRUE(dropout_mask(p, seed, 0, view(kept)).ok());
  std::vector<double> all(static_cast<size_t>(kept.size()), 1.0);
  for (size_t n = 0; n < all.size() && p > 0; ++n) all[n] = kept.at(static_cast<int64_t>(n)) / (1 - p);
  return all;
}

Array expected_out(const FeedForwardCase& c, const FeedForwardNumbers& in) {
  const FeedForwardBlockDesc& d = c.desc;
  const Array n = d.norm.pre ? normed(d.norm, in.x, in.gamma, in.beta) : in.x;
  const std::vector<double> g1 = factors(d.inner_dropout_p, kInnerSeed, d, d.inner_size);
  const std::vector<double> g2 = factors(d.output_dropout_p, kOutputSeed, d, d.size);
  Array out = in.x;
  std::vector<double> h(static_cast<size_t>(d.inner_size));
  for (int64_t row = 0; row < d.batch * d.seqlen; ++row) {
    for (int64_t f = 0; f < d.inner_size; ++f) {
      double u = d.bias1 ? in.bias1.at(f) : 0;
      for (int64_t e = 0; e < d.size; ++e) u += n.at(row * d.size + e) * in.weight1.at(e * d.inner_size + f);
      h[static_cast<size_t>(f)] = activated(d.activation, u) * g1[static_cast<size_t>(row * d.inner_size + f)];
    }
    for (int64_t e = 0; e < d.size; ++e) {
      double y = d.bias2 ? in.bias2.at(e) : 0;
      for (int64_t f = 0; f < d.inner_size; ++f) y += h[static_cast<size_t>(f)] * in.weight2.at(f * d.size + e);
      y *= g2[static_cast<size_t>(row * d.size + e)];
      out.set(row * d.size + e, y + (d.residual ? in.x.at(row * d.size + e) : 0));
    }
  }
  return d.norm.pre ? out : normed(d.norm, out, in.gamma, in.beta);
}

TEST(FeedForwardBlock, MatchesFormulasAndSlopes) {
  for (FeedForwardCase c : feed_forward_cases()) {
    SCOPED_TRACE(c.name);
    c.desc.dtype = DType::kFloat64;
    FeedForwardNumbers in = numbers_of(c);
    const Arrays got = run(c, in, "", 1, true);
    expect_near(got.at("out"), expected_out(c, in), 1e-12, "out");
    const auto loss = [&] { return inner_product(run(c, in, "", 1, false).at("out"), in.grad_out); };
    for (const auto& [name, input] : in.all()) {
      if (const auto found = got.find(std::string("grad_") + name); found != got.end() && found->first != "grad_out") {
        expect_slopes(name, *input, found->second, loss);
      }
    }
  }
}

TEST(FeedForwardBlock, EveryKernelAndDType) {
  for (FeedForwardCase c : feed_forward_cases()) {
    SCOPED_TRACE(c.name);
    const FeedForwardNumbers in = numbers_of(c);
    expect_all_kernels<FeedForwardCase&>(c, c.desc.dtype, in);
  }
}

// An identity at p = .5 and .5 keeps a quarter of the places, which it would not if both dropouts drew the same bits.
TEST(FeedForwardBlock, DropoutsDrawDifferentBits) {
  constexpr int64_t kRows = 512, kSize = 16;
  FeedForwardBlockDesc desc;
  desc.seqlen = kRows, desc.size = desc.inner_size = kSize;
  desc.activation = ActivationKind::kNone, desc.norm.kind = NormKind::kNone;
  desc.bias1 = desc.bias2 = desc.residual = false;
  desc.inner_dropout_p = desc.output_dropout_p = 0.5;
  const Result<FeedForwardBlock> block = feed_forward_block(desc);
  ASSERT_TRUE(block.ok()) << block.status().message();
  const Memory workspace(block->workspace_bytes()), reserve(block->reserve_bytes());
  Array x(DType::kFloat32, {1, kRows, kSize}), out = x, identity(DType::kFloat32, {kSize, kSize});
  for (int64_t n = 0; n < x.size(); ++n) x.set(n, 1), out.set(n, 7);
  for (int64_t n = 0; n < kSize; ++n) identity.set(n * kSize + n, 1);
  FeedForwardBlockForwardArgs args;
  args.x = view(x), args.out = view(out);
  args.weights.weight1 = args.weights.weight2 = view(identity);
  args.workspace = workspace.data(), args.workspace_bytes = block->workspace_bytes();
  args.reserve = reserve.data(), args.reserve_bytes = block->reserve_bytes();
  EXPECT_EQ(block->forward(args).message(), "inner_dropout_seed is not given, must be where inner_dropout_p is 0.5");
  args.inner_dropout_seed = args.output_dropout_seed = 5;
  EXPECT_EQ(block->forward(args).message(),
            "output_dropout_seed is 5 and output_dropout_offset 0, with which inner_dropout draws too: both would drop "
            "the same places, give another seed or offset");
  EXPECT_EQ(out.at(0), 7);
  args.output_dropout_offset = 1;
  ASSERT_EQ(block->forward(args).message(), "");
  double kept = 0;
  for (int64_t n = 0; n < out.size(); ++n) kept += out.at(n) != 0;
  EXPECT_NEAR(kept / static_cast<double>(out.size()), 0.25, 0.03);

  FeedForwardBlockBackwardArgs backward;
  const Memory backward_workspace(block->backward_workspace_bytes());
  backward.forward = args;
  backward.forward.workspace = backward_workspace.data();
  backward.forward.workspace_bytes = block->backward_workspace_bytes();
  backward.grad_out = view(x), backward.grad_x = view(out);
  backward.forward.output_dropout_offset = 2;
  EXPECT_EQ(block->backward(backward).message(), "output_dropout_offset is 2, that of the forward call was 1");
}

TEST(FeedForwardBlock, ErrorsNameTheArgument) {
  FeedForwardCase f = feed_forward_cases()[0];
  f.desc.inner_dropout_p = 2;
  EXPECT_EQ(feed_forward_block(f.desc).status().message(), "inner_dropout_p is 2, must be 0 to 1");
  f.desc.inner_dropout_p = 0;
  const Result<FeedForwardBlock> feed_forward = feed_forward_block(f.desc);
  ASSERT_TRUE(feed_forward.ok());
  FeedForwardBlockBackwardArgs backward;
  EXPECT_EQ(feed_forward->backward(backward).message(), "reserve is null: backward needs what forward wrote there");
}

}  // namespace
}  // namespace polyhead::testing
