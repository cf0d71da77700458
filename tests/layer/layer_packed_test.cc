// Weights that are packed once: the same bits as weights that are packed by each call, and errors that tell whose they
// are.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "kernels_to_test.h"
#include "layer_block.h"
#include "layer_problem.h"

namespace polyhead::testing {
namespace {

LayerWeights views(const LayerInputs& in) {
  const auto& w = in.weights;
  return {view_if(w[0]), view_if(w[1]), view_if(w[2]), view_if(w[3]),
          view_if(w[4]), view_if(w[5]), view_if(w[6]), view_if(w[7])};
}

LayerWeights biases_of(LayerWeights weights) {
  weights.query = weights.key = weights.value = weights.out = {};
  return weights;
}

LayerForwardArgs args_of(const LayerProblem& problem, const LayerInputs& in) {
  LayerForwardArgs args;
  args.query = view(in.query);
  args.key = problem.key_is_query ? args.query : view(in.key);
  args.value = problem.value_is_key ? args.key : view(in.value);
  args.residual = view_if(in.residual);
  args.weights = views(in);
  args.attn_mask = view_if(in.attn_mask);
  args.attn_bias = view_if(in.attn_bias);
  args.alibi_slopes = view_if(in.alibi_slopes);
  args.sink_logits = view_if(in.sink_logits);
  args.seqlens_q = view_if(in.seqlens_q);
  args.seqlens_k = view_if(in.seqlens_k);
  args.query_offsets = view_if(in.query_offsets);
  args.window_lo = view_if(in.window_lo);
  args.window_hi = view_if(in.window_hi);
  args.dropout_seed = in.dropout_seed;
  args.output_dropout_seed = in.output_dropout_seed;
  return args;
}

struct Packed {
  Memory memory;
  Packed(const Layer& layer, const LayerWeights& weights) : memory(layer.prepacked_weights_bytes()) {
    EXPECT_EQ(layer.prepack_weights(biases_of(weights), memory.data(), layer.prepacked_weights_bytes()).ok(),
              !weights.query.given() && !weights.key.given() && !weights.value.given() && !weights.out.given());
    EXPECT_EQ(layer.prepack_weights(weights, memory.data(), layer.prepacked_weights_bytes()).message(), "");
  }
};

// What forward writes: out, and in training the reserve behind its head, where q, k and v are.
std::vector<uint8_t> forward(const Layer& layer, LayerForwardArgs args, const Array& like, bool training) {
  const Memory workspace(layer.workspace_bytes()), reserve(layer.reserve_bytes());
  Array out = unwritten(like), attn_weights;
  const LayerDesc& d = layer.desc();
  args.out = view(out);
  if (d.attention.return_weights == ReturnWeights::kMean) {
    attn_weights = Array(d.dtype, {d.batch, d.beam, d.seqlen_q, d.seqlen_k});
  } else if (d.attention.return_weights == ReturnWeights::kPerHead) {
    attn_weights = Array(d.dtype, {d.batch, d.beam, d.num_heads, d.seqlen_q, d.seqlen_k});
  }
  args.attn_weights = view_if(attn_weights);
  args.workspace = workspace.data(), args.workspace_bytes = layer.workspace_bytes();
  if (training) args.reserve = reserve.data(), args.reserve_bytes = layer.reserve_bytes();
  EXPECT_EQ(layer.forward(args).message(), "");
  std::vector<uint8_t> bytes(out.bytes.begin(), out.bytes.end());
  bytes.insert(bytes.end(), attn_weights.bytes.begin(), attn_weights.bytes.end());
  const auto* saved = static_cast<const uint8_t*>(reserve.data());
  if (training) bytes.insert(bytes.end(), saved, saved + layer.reserve_bytes());
  return bytes;
}

void expect_same_bits(const LayerProblem& problem, const std::string& kernel, int threads) {
  const Result<Layer> made = layer(problem.desc, options_of(kernel, threads));
  ASSERT_TRUE(made.ok()) << made.status().message();
  const LayerInputs in = random_inputs(problem);
  LayerForwardArgs plain = args_of(problem, in), packed = plain;
  const Packed memory(*made, plain.weights);
  packed.weights = biases_of(plain.weights);
  packed.prepacked_weights = memory.memory.data(), packed.prepacked_weights_bytes = made->prepacked_weights_bytes();
  for (const bool training : {false, true}) {
    EXPECT_TRUE(forward(*made, plain, in.grad_out, training) == forward(*made, packed, in.grad_out, training))
        << (training ? "training" : "inference");
  }
}

TEST(PackedWeights, SameBits) {
  for (LayerProblem problem : layer_problems()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      problem.desc.dtype = dtype;
      for (const Kernel* kernel : kernels_to_test()) {
        if (!layer(problem.desc, options_of(kernel->name, 1)).ok()) continue;
        SCOPED_TRACE(problem.name + " " + dtype_name(dtype) + " on " + kernel->name);
        expect_same_bits(problem, kernel->name, problem.desc.batch % 2 == 0 ? 1 : 3);
      }
    }
  }
}

// Of sizes that fill panels, so that q, k and v are one product, of sizes that do not, or that fill panels whose bytes
// do not fill a line, and of few and many tokens. Inputs of 600 are more than a chunk. Biases, which are arrays of
// their own here, keep the products apart.
TEST(PackedWeights, SameBitsWhereProductsAreJoined) {
  struct Sizes {
    int64_t tokens, dim, input;
  };
  for (const auto& [tokens, dim, input] :
       {Sizes{1, 32, 600}, {3, 32, 600}, {200, 32, 600}, {1, 20, 600}, {40, 20, 600}, {3, 4, 27}, {40, 4, 27}}) {
    LayerProblem problem;
    problem.name = std::to_string(tokens) + " tokens, heads of " + std::to_string(dim);
    problem.key_is_query = problem.value_is_key = true;
    LayerDesc& d = problem.desc;
    d.seqlen_q = d.seqlen_k = tokens;
    d.num_heads = 4, d.num_heads_kv = 2;
    d.query_size = d.key_size = d.value_size = d.out_proj_size = input;
    d.query_proj_size = d.key_proj_size = d.value_proj_size = dim;
    d.query_bias = d.key_bias = d.value_bias = input == 600 && tokens == 3;
    for (const Kernel* kernel : kernels_to_test()) {
      if (std::string(kernel->name) == "reference" || !layer(d, options_of(kernel->name, 1)).ok()) continue;
      SCOPED_TRACE(problem.name + " on " + kernel->name);
      expect_same_bits(problem, kernel->name, 2);
    }
  }
}

// The last of so many threads does all work, in memory that lies behind all others'.
class LastThread final : public Executor {
 public:
  explicit LastThread(int threads) : threads_(threads) {}
  int num_threads() const override { return threads_; }
  void parallel_for(int count, void (*body)(void* context, int index), void* context) override {
    for (int i = count - 1; i >= 0; --i) body(context, i);
  }

 private:
  int threads_;
};

// What a block writes; its workspace ends at a page that cannot be touched.
Array output_of(const FeedForwardBlock& block, FeedForwardBlockForwardArgs args, const Array& x) {
  const Memory workspace(block.workspace_bytes());
  Array out = unwritten(x);
  args.x = view(x), args.out = view(out);
  args.workspace = workspace.data(), args.workspace_bytes = block.workspace_bytes();
  EXPECT_EQ(block.forward(args).message(), "");
  return out;
}

// Products are cut otherwise where weights are packed before, and more threads have more scratch: the workspace holds both.
TEST(PackedWeights, ManyThreadsStayInTheWorkspace) {
  struct Sizes {
    int64_t tokens, size, inner;
  };
  for (const auto& [tokens, size, inner] : {Sizes{384, 64, 128}, {152, 96, 384}, {152, 64, 128}, {384, 128, 320}}) {
    FeedForwardBlockDesc desc;
    desc.seqlen = tokens, desc.size = size, desc.inner_size = inner;
    desc.bias1 = desc.bias2 = false, desc.norm.kind = NormKind::kNone;
    Random random(7);
    const Array x = random_array(random, DType::kFloat32, {1, tokens, size}, 0, 1);
    const Array w1 = random_array(random, DType::kFloat32, {size, inner}, 0, 1);
    const Array w2 = random_array(random, DType::kFloat32, {inner, size}, 0, 1);
    FeedForwardBlockForwardArgs plain;
    plain.weights.weight1 = view(w1), plain.weights.weight2 = view(w2);
    for (const Kernel* kernel : kernels_to_test()) {
      Array first;
      for (const int threads : {1, 2, 3, 5, 6, 8, 10, 16}) {
        LastThread executor(threads);
        PlanOptions options = options_of(kernel->name, threads);
        options.where.executor = &executor;
        const Result<FeedForwardBlock> made = feed_forward_block(desc, options);
        if (!made.ok()) break;
        SCOPED_TRACE(std::to_string(tokens) + " x " + std::to_string(size) + " x " + std::to_string(inner) + " on " +
                     kernel->name + ", threads " + std::to_string(threads));
        const Memory memory(made->prepacked_weights_bytes());
        ASSERT_EQ(made->prepack_weights(plain.weights, memory.data(), made->prepacked_weights_bytes()).message(), "");
        FeedForwardBlockForwardArgs packed;
        packed.prepacked_weights = memory.data(), packed.prepacked_weights_bytes = made->prepacked_weights_bytes();
        const Array out = output_of(*made, plain, x);
        if (threads == 1) first = out;
        ASSERT_EQ(difference("packed by each call", out, first), "");
        ASSERT_EQ(difference("packed before", output_of(*made, packed, x), first), "");
      }
    }
  }
}

LayerDesc small_desc() {
  LayerDesc d;
  d.seqlen_q = d.seqlen_k = 6;
  d.num_heads = d.num_heads_kv = 2;
  d.query_size = d.key_size = d.value_size = d.out_proj_size = 12;
  d.query_proj_size = d.key_proj_size = d.value_proj_size = 8;
  return d;
}

TEST(PackedWeights, AStepReadsTheSame) {
  LayerProblem problem;
  problem.desc = small_desc();
  problem.key_is_query = problem.value_is_key = true;
  LayerDesc longer = small_desc();
  longer.batch = 3, longer.seqlen_q = longer.seqlen_k = 50, longer.attention.dropout_p = 0.1;
  const Result<Layer> made = layer(problem.desc), other = layer(longer);
  ASSERT_TRUE(made.ok() && other.ok());
  const LayerInputs in = random_inputs(problem);
  LayerForwardArgs args = args_of(problem, in);
  const Packed packed(*other, args.weights);  // layers that differ in nothing of the weights share them
  args.query.dims[2] = 1;
  args.key = args.value = args.query;
  args.step = 2;
  const Memory workspace(made->workspace_bytes());
  args.workspace = workspace.data(), args.workspace_bytes = made->workspace_bytes();
  Array outs[2], keys[2], values[2];
  for (int n = 0; n < 2; ++n) {
    outs[n] = Array(DType::kFloat32, {1, 1, 1, 12});
    keys[n] = values[n] = Array(DType::kFloat32, {1, 1, 6, 2, 8});
    args.out = view(outs[n]), args.key_cache = view(keys[n]), args.value_cache = view(values[n]);
    if (n == 1)
      args.prepacked_weights = packed.memory.data(), args.prepacked_weights_bytes = made->prepacked_weights_bytes();
    EXPECT_EQ(made->forward(args).message(), "");
  }
  EXPECT_EQ(difference("out", outs[0], outs[1]), "");
  EXPECT_EQ(difference("keys", keys[0], keys[1]), "");
  EXPECT_EQ(difference("values", values[0], values[1]), "");
}

TEST(PackedWeights, ErrorsTellWhoseTheyAre) {
  LayerProblem problem;
  problem.desc = small_desc();
  const Result<Layer> made = layer(problem.desc);
  LayerDesc other_desc = small_desc();
  other_desc.query_proj_size = other_desc.key_proj_size = 4;
  const Result<Layer> other = layer(other_desc);
  ASSERT_TRUE(made.ok() && other.ok());
  const LayerInputs in = random_inputs(problem);
  LayerForwardArgs args = args_of(problem, in);
  const size_t bytes = made->prepacked_weights_bytes();
  const Memory memory(bytes), workspace(made->workspace_bytes());
  Array out = unwritten(in.grad_out);
  const std::string untouched(out.bytes.begin(), out.bytes.end());
  args.out = view(out);
  args.workspace = workspace.data(), args.workspace_bytes = made->workspace_bytes();
  args.prepacked_weights = memory.data(), args.prepacked_weights_bytes = bytes;
  std::memset(memory.data(), 0, bytes);
  const std::string needs = ", needs " + std::to_string(bytes);
  const std::string too_small = "prepacked_weights_bytes is " + std::to_string(bytes - 1) + needs;

  EXPECT_EQ(made->prepack_weights(args.weights, nullptr, bytes).message(),
            "prepacked_weights is null" + needs + " bytes");
  EXPECT_EQ(made->prepack_weights(args.weights, memory.data(), bytes - 1).message(), too_small);
  EXPECT_EQ(made->prepack_weights(args.weights, static_cast<char*>(memory.data()) + 4, bytes).message(),
            "prepacked_weights is not aligned to 64 bytes");
  LayerWeights missing = args.weights;
  missing.value = {};
  EXPECT_EQ(made->prepack_weights(missing, memory.data(), bytes).message(), "weights.value is missing");
  EXPECT_EQ(made->forward(args).message(),
            "prepacked_weights holds none: prepack_weights() with this memory comes first");

  ASSERT_EQ(made->prepack_weights(args.weights, memory.data(), bytes).message(), "");
  LayerForwardArgs bad = args;
  bad.prepacked_weights_bytes = bytes - 1;
  EXPECT_EQ(made->forward(bad).message(), too_small);
  bad.prepacked_weights_bytes = bytes, bad.workspace = memory.data();
  EXPECT_EQ(made->forward(bad).message(), made->workspace_bytes() > 0 ? "workspace overlaps prepacked_weights" : "");
  LayerForwardArgs smaller = args;  // weights, too, are of the wrong sizes, but are not looked at
  EXPECT_EQ(other->forward(smaller).message(),
            "prepacked_weights was prepacked for other sizes, another dtype or another kernel");
  EXPECT_EQ(std::string(out.bytes.begin(), out.bytes.end()), untouched);
  EXPECT_EQ(made->forward(args).message(), "");
  for (const Kernel* kernel : kernels_to_test()) {
    if (std::string(kernel->name) == made->kernel_name()) continue;
    const Result<Layer> by_other = layer(problem.desc, options_of(kernel->name, 1));
    if (!by_other.ok()) continue;
    LayerForwardArgs of_other = args;
    const Memory larger(by_other->workspace_bytes()), copy(by_other->prepacked_weights_bytes());
    std::memset(copy.data(), 0, by_other->prepacked_weights_bytes());
    std::memcpy(copy.data(), memory.data(), 64);
    of_other.workspace = larger.data(), of_other.workspace_bytes = by_other->workspace_bytes();
    of_other.prepacked_weights = copy.data(), of_other.prepacked_weights_bytes = by_other->prepacked_weights_bytes();
    EXPECT_EQ(by_other->forward(of_other).message(),
              "prepacked_weights was prepacked for other sizes, another dtype or another kernel");
  }
}

TEST(PackedWeights, OfBlocks) {
  AttentionBlockDesc attention;
  attention.layer = small_desc();
  attention.layer.residual = true;
  FeedForwardBlockDesc feed_forward;
  feed_forward.seqlen = 6, feed_forward.size = 12, feed_forward.inner_size = 40;
  feed_forward.inner_dropout_p = 0.2;
  Random random(3);
  const auto numbers = [&](std::vector<int64_t> dims) { return random_array(random, DType::kFloat32, dims, 0, 1); };
  const Array x = numbers({1, 6, 12}), vector = numbers({12}), inner = numbers({40});
  const Array weight1 = numbers({12, 40}), weight2 = numbers({40, 12});
  LayerProblem problem;
  problem.desc = attention.layer;
  const LayerInputs in = random_inputs(problem);
  for (const Kernel* kernel : kernels_to_test()) {
    const Result<AttentionBlock> a = attention_block(attention, options_of(kernel->name, 2));
    const Result<FeedForwardBlock> f = feed_forward_block(feed_forward, options_of(kernel->name, 2));
    if (!a.ok() || !f.ok()) continue;
    SCOPED_TRACE(kernel->name);
    AttentionBlockForwardArgs attend;
    FeedForwardBlockForwardArgs feed;
    const Memory workspace(std::max(a->workspace_bytes(), f->workspace_bytes()));
    const Memory reserve(std::max(a->reserve_bytes(), f->reserve_bytes()));
    const Packed packed(a->layer(), views(in));
    const Memory packed_feed(f->prepacked_weights_bytes());
    attend.layer.query = feed.x = view(x);
    attend.layer.weights = views(in);
    attend.norm = feed.weights.norm = {view(vector), view(vector)};
    feed.weights.weight1 = view(weight1), feed.weights.bias1 = view(inner);
    feed.weights.weight2 = view(weight2), feed.weights.bias2 = view(vector);
    feed.inner_dropout_seed = 1;
    attend.layer.workspace = feed.workspace = workspace.data();
    attend.layer.workspace_bytes = a->workspace_bytes(), feed.workspace_bytes = f->workspace_bytes();
    attend.layer.reserve = feed.reserve = reserve.data();
    attend.layer.reserve_bytes = a->reserve_bytes(), feed.reserve_bytes = f->reserve_bytes();
    Array attended[2], fed[2];
    for (int n = 0; n < 2; ++n) {
      attended[n] = fed[n] = unwritten(x);
      attend.layer.out = view(attended[n]), feed.out = view(fed[n]);
      EXPECT_EQ(a->forward(attend).message(), "");
      EXPECT_EQ(f->forward(feed).message(), "");
      if (n == 1) break;
      attend.layer.weights = biases_of(attend.layer.weights);
      attend.layer.prepacked_weights = packed.memory.data();
      attend.layer.prepacked_weights_bytes = a->layer().prepacked_weights_bytes();
      EXPECT_EQ(f->prepack_weights(feed.weights, packed_feed.data(), 8).message(),
                "prepacked_weights_bytes is 8, needs " + std::to_string(f->prepacked_weights_bytes()));
      EXPECT_EQ(f->prepack_weights(feed.weights, packed_feed.data(), f->prepacked_weights_bytes()).message(), "");
      feed.weights.weight1 = feed.weights.weight2 = {};
      EXPECT_EQ(f->forward(feed).message(), "weights.weight1 is missing");
      feed.prepacked_weights = packed.memory.data(), feed.prepacked_weights_bytes = f->prepacked_weights_bytes();
      if (a->layer().prepacked_weights_bytes() >= f->prepacked_weights_bytes()) {
        EXPECT_EQ(f->forward(feed).message(),
                  "prepacked_weights was prepacked for other sizes, another dtype or another kernel");
      }
      feed.prepacked_weights = packed_feed.data();
    }
    EXPECT_EQ(difference("attention", attended[0], attended[1]), "");
    EXPECT_EQ(difference("feed-forward", fed[0], fed[1]), "");
  }
}

}  // namespace
}  // namespace polyhead::testing
