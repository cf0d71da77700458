// Attention blocks: as layer_block.h says.
#include "layer_block.h"

namespace polyhead::testing {
namespace {

struct AttentionCase {
  std::string name;
  AttentionBlockDesc desc;
  bool cross = false;
};

std::vector<AttentionCase> attention_cases() {
  std::vector<AttentionCase> cases;
  const auto add = [&](const char* name, auto change) {
    AttentionCase c;
    c.name = name;
    LayerDesc& d = c.desc.layer;
    d.batch = 2;
    d.seqlen_q = d.seqlen_k = 6;
    d.num_heads = 2, d.num_heads_kv = 1;
    d.query_size = d.key_size = d.value_size = d.out_proj_size = 12;
    d.query_proj_size = d.key_proj_size = d.value_proj_size = 6;
    d.residual = true;
    change(c, d);
    cases.push_back(c);
  };
  add("pre", [](auto&, auto& d) { d.query_bias = d.out_bias = d.attention.causal = true; });
  add("post", [](auto& c, auto&) { c.desc.norm.pre = false; });
  add("pre_rms_no_residual", [](auto& c, auto& d) {
    c.desc.norm.kind = NormKind::kRmsNorm, c.desc.norm.beta = false;
    d.residual = false;
  });
  add("post_rms_dropouts", [](auto& c, auto& d) {
    c.desc.norm.kind = NormKind::kRmsNorm, c.desc.norm.pre = false;
    d.attention.dropout_p = 0.2, d.output_dropout_p = 0.3;
  });
  add("pre_dropouts_bias", [](auto&, auto& d) {
    d.attention.dropout_p = 0.2, d.output_dropout_p = 0.3;
    d.attention.attn_bias = {true, DType::kFloat32, {1, 2, 6, 6}};
  });
  add("no_norm", [](auto& c, auto&) { c.desc.norm.kind = NormKind::kNone; });
  add("no_norm_no_residual", [](auto& c, auto& d) { c.desc.norm.kind = NormKind::kNone, d.residual = false; });
  for (const bool pre : {true, false}) {
    add(pre ? "cross_pre" : "cross_post", [&](auto& c, auto& d) {
      c.cross = true;
      c.desc.norm.pre = pre;
      c.desc.norm.gamma = pre;
      d.seqlen_k = 9, d.key_size = 5, d.value_size = 7;
      d.value_bias = true;
    });
  }
  return cases;
}

struct AttentionNumbers {
  LayerInputs layer;
  Array gamma, beta;
};

AttentionNumbers numbers_of(const AttentionCase& c) {
  LayerProblem problem;
  problem.desc = c.desc.layer;
  problem.seed = 5;
  problem.desc.residual = false;
  AttentionNumbers in{random_inputs(problem), {}, {}};
  Random random(9);
  const int64_t size = c.desc.norm.pre ? c.desc.layer.query_size : out_size_of(c.desc.layer);
  in.gamma = random_array(random, c.desc.layer.dtype, {size}, 1, 0.3);
  in.beta = random_array(random, c.desc.layer.dtype, {size}, 0, 0.3);
  return in;
}

AttentionNumbers numbers_in(const AttentionNumbers& from, DType dtype) {
  AttentionNumbers to = from;
  for (Array* a : {&to.layer.query, &to.layer.key, &to.layer.value, &to.layer.grad_out, &to.gamma, &to.beta}) {
    *a = to_dtype(*a, dtype);
  }
  for (Array& weight : to.layer.weights) weight = to_dtype(weight, dtype);
  return to;
}

template <class Lent>
LayerWeights weights_of(std::array<Array, kNumWeightKinds>& arrays, const Lent& lent) {
  LayerWeights weights;
  Tensor* const all[] = {&weights.query,      &weights.key,      &weights.value,      &weights.out,
                         &weights.query_bias, &weights.key_bias, &weights.value_bias, &weights.out_bias};
  for (size_t n = 0; n < kNumWeightKinds; ++n) {
    if (arrays[n].given()) *all[n] = lent(arrays[n]);
  }
  return weights;
}

Result<AttentionBlock> block_of(const AttentionCase& c, const std::string& kernel, int threads) {
  return attention_block(c.desc, options_of(kernel, threads));
}

// Out, and with `train` all gradients.
Arrays run(const AttentionCase& c, AttentionNumbers in, const std::string& kernel, int threads, bool train) {
  const Result<AttentionBlock> block = block_of(c, kernel, threads);
  EXPECT_TRUE(block.ok()) << block.status().message();
  const Memory workspace(block->workspace_bytes()), reserve(block->reserve_bytes());
  const Memory backward_workspace(block->backward_workspace_bytes());
  const NormDesc& norm = c.desc.norm;
  const bool normed = norm.kind != NormKind::kNone;
  Arrays got;
  LentArrays lent(kernel);
  AttentionBlockForwardArgs args;
  args.layer.query = lent.in(in.layer.query);
  if (c.cross) args.layer.key = lent.in(in.layer.key), args.layer.value = lent.in(in.layer.value);
  args.layer.weights = weights_of(in.layer.weights, [&](const Array& array) { return lent.in(array); });
  args.layer.attn_bias = lent.in(in.layer.attn_bias);
  args.layer.dropout_seed = in.layer.dropout_seed, args.layer.dropout_offset = in.layer.dropout_offset;
  args.layer.output_dropout_seed = in.layer.output_dropout_seed;
  args.layer.output_dropout_offset = in.layer.output_dropout_offset;
  if (normed && norm.gamma) args.norm.gamma = lent.in(in.gamma);
  if (normed && norm.beta) args.norm.beta = lent.in(in.beta);
  got["out"] = unwritten(in.layer.grad_out);
  args.layer.out = lent.out(got["out"]);
  args.layer.workspace = lent.memory(workspace), args.layer.workspace_bytes = block->workspace_bytes();
  args.layer.reserve = lent.memory(reserve), args.layer.reserve_bytes = block->reserve_bytes();
  EXPECT_EQ(block->forward(args).message(), "");
  if (!train) return lent.finish(), got;

  AttentionBlockBackwardArgs backward;
  backward.forward = args;
  backward.forward.layer.out = {};
  backward.forward.layer.workspace = lent.memory(backward_workspace);
  backward.forward.layer.workspace_bytes = block->backward_workspace_bytes();
  backward.grad_out = lent.in(in.layer.grad_out);
  const auto gradient = [&](const char* name, const Array& of, Tensor* to) {
    if (!of.given()) return;
    got[name] = unwritten(of);
    *to = lent.out(got[name]);
  };
  gradient("grad_query", in.layer.query, &backward.grad_query);
  if (c.cross) gradient("grad_key", in.layer.key, &backward.grad_key);
  if (c.cross) gradient("grad_value", in.layer.value, &backward.grad_value);
  gradient("grad_attn_bias", in.layer.attn_bias, &backward.grad_attn_bias);
  if (normed && norm.gamma) gradient("grad_gamma", in.gamma, &backward.grad_norm.gamma);
  if (normed && norm.beta) gradient("grad_beta", in.beta, &backward.grad_norm.beta);
  std::array<Array, kNumWeightKinds> grad_weights;
  for (size_t n = 0; n < kNumWeightKinds; ++n) {
    if (in.layer.weights[n].given()) grad_weights[n] = unwritten(in.layer.weights[n]);
  }
  backward.grad_weights = weights_of(grad_weights, [&](const Array& array) { return lent.out(array); });
  EXPECT_EQ(block->backward(backward).message(), "");
  lent.finish();
  for (size_t n = 0; n < kNumWeightKinds; ++n) {
    if (grad_weights[n].given()) got["grad_weight" + std::to_string(n)] = grad_weights[n];
  }
  return got;
}

Array expected_out(const AttentionCase& c, const AttentionNumbers& in) {
  LayerProblem problem;
  problem.desc = c.desc.layer;
  LayerInputs layer = in.layer;
  const NormDesc& norm = c.desc.norm;
  if (norm.pre) layer.query = normed(norm, in.layer.query, in.gamma, in.beta);
  if (!c.cross) layer.key = layer.value = layer.query;
  if (problem.desc.residual) layer.residual = in.layer.query;
  const Array out = expected(problem, layer).exact.out;
  return norm.pre ? out : normed(norm, out, in.gamma, in.beta);
}

TEST(AttentionBlock, MatchesFormulasAndSlopes) {
  for (AttentionCase c : attention_cases()) {
    SCOPED_TRACE(c.name);
    c.desc.layer.dtype = DType::kFloat64;
    AttentionNumbers in = numbers_of(c);
    const Arrays got = run(c, in, "", 1, true);
    expect_near(got.at("out"), expected_out(c, in), 1e-12, "out");
    const auto loss = [&] { return inner_product(run(c, in, "", 1, false).at("out"), in.layer.grad_out); };
    std::vector<std::pair<std::string, Array*>> inputs = {{"query", &in.layer.query},
                                                          {"key", &in.layer.key},
                                                          {"value", &in.layer.value},
                                                          {"gamma", &in.gamma},
                                                          {"beta", &in.beta}};
    for (size_t n = 0; n < kNumWeightKinds; ++n) {
      inputs.push_back({"weight" + std::to_string(n), &in.layer.weights[n]});
    }
    for (const auto& [name, input] : inputs) {
      if (const auto found = got.find("grad_" + name); found != got.end()) {
        expect_slopes(name, *input, found->second, loss);
      }
    }
  }
}

TEST(AttentionBlock, EveryKernelAndDType) {
  for (AttentionCase c : attention_cases()) {
    SCOPED_TRACE(c.name);
    const AttentionNumbers in = numbers_of(c);
    expect_all_kernels<AttentionCase&>(c, c.desc.layer.dtype, in);
  }
}

// As the layer's: 512 equal beams give 512 times what one gives, which a running sum in 16 bits does not.
TEST(AttentionBlock, SharedKeysSumTheirGradientsInFloat32) {
  constexpr int64_t kBeams = 512, kSize = 8;
  AttentionCase c;
  c.cross = true;
  LayerDesc& d = c.desc.layer;
  d.seqlen_q = 1, d.seqlen_k = 5;
  d.query_size = d.key_size = d.value_size = kSize;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    d.dtype = dtype;
    const auto takes = [&](const std::string& kernel, int64_t beams) {
      d.beam = beams;
      return !refused(block_of(c, kernel, 1).status());
    };
    const auto gradients = [&](const std::string& kernel, int64_t beams) {
      d.beam = 1;
      AttentionNumbers in = numbers_of(c);
      for (Array* array : {&in.layer.query, &in.layer.grad_out}) {
        const Array one = *array;
        *array = Array(dtype, {1, beams, 1, kSize});
        for (int64_t n = 0; n < array->size(); ++n) array->set(n, one.at(n % kSize));
      }
      d.beam = beams;
      return run(c, in, kernel, 1, true);
    };
    for (const Kernel* kernel : kernels_to_test(device_under_test.device)) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + " on " + kernel->name);
      if (!takes(kernel->name, 1) || !takes(kernel->name, kBeams)) continue;
      const Arrays one = gradients(kernel->name, 1), all = gradients(kernel->name, kBeams);
      for (const char* name : {"grad_key", "grad_value"}) {
        for (int64_t n = 0; n < one.at(name).size(); ++n) {
          EXPECT_EQ(all.at(name).at(n), kBeams * one.at(name).at(n)) << name << " " << n;
        }
      }
    }
  }
}

TEST(AttentionBlock, ErrorsNameTheArgument) {
  AttentionCase c = attention_cases()[0];
  c.desc.layer.out_proj_size = 11;
  EXPECT_EQ(attention_block(c.desc).status().message(),
            "residual adds query to out: out size is 11, must be query_size 12");
  c = attention_cases()[0];
  c.desc.norm.eps = 0;
  EXPECT_EQ(attention_block(c.desc).status().message(), "norm.eps is 0, must be a positive finite number");
  c.desc.norm.eps = 1e-5;
  const Result<AttentionBlock> block = attention_block(c.desc);
  ASSERT_TRUE(block.ok());
  AttentionBlockForwardArgs args;
  EXPECT_EQ(block->forward(args).message(), "query is missing");
  AttentionNumbers in = numbers_of(c);
  args.layer.query = args.layer.key = view(in.layer.query);
  EXPECT_EQ(block->forward(args).message(),
            "layer.value is missing: give key and value, or neither for self-attention");
  args.layer.key = {};
  EXPECT_EQ(block->forward(args).message(), "norm.gamma is missing");
  args.norm.gamma = args.norm.beta = view(in.gamma);
  EXPECT_EQ(block->forward(args).message(), "weights.query is missing");
  args.layer.weights = block->layer().weights_in(in.layer.query.bytes.data());  // not looked at before out is
  EXPECT_EQ(block->forward(args).message(), "out is missing");
}

}  // namespace
}  // namespace polyhead::testing
