// Extreme sizes of the layer and of both blocks, through C++ and through C: what is made must tell at least the sizes that
// follow from its desc, and what is little work runs: training, inference with caches, one step, packed weights
// (size_fuzz.h).
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>

#include "contract/linear.h"
#include "kernels_to_test.h"
#include "left_out.h"
#include "polyhead/block.h"
#include "size_fuzz.h"
#include "through_c.h"

namespace polyhead::testing {
namespace {

struct Chance {
  Random& random;
  bool operator()(int percent) const { return random.integer(0, 99) < percent; }
};

LayerDesc random_layer(Random& random, Sizes& size) {
  const Chance chance{random};
  const auto some = [&] { return std::max<int64_t>(size(), 1); };
  LayerDesc d;
  d.batch = size(), d.seqlen_q = size(), d.seqlen_k = chance(40) ? d.seqlen_q : size();
  d.beam = chance(60) ? 1 : some();
  d.beam_kv = chance(50) ? 1 : d.beam;
  d.num_heads = d.num_heads_kv = some();
  if (chance(30)) __builtin_mul_overflow(d.num_heads_kv, some(), &d.num_heads);
  d.query_size = size(), d.key_size = chance(60) ? d.query_size : size(),
  d.value_size = chance(60) ? d.key_size : size();
  if (chance(80)) {
    d.query_proj_size = d.key_proj_size = some();
    d.query_bias = chance(50), d.key_bias = chance(50);
  } else {
    d.key_size = d.query_size;
  }
  if (chance(70)) d.value_proj_size = some(), d.value_bias = chance(50);
  if (chance(70)) d.out_proj_size = chance(60) ? d.query_size : size(), d.out_bias = chance(50) && d.out_proj_size > 0;
  d.residual = chance(40);
  d.output_dropout_p = chance(20) ? 0.25 : 0;
  d.has_windows = chance(10);
  d.dtype = random_dtype(random);
  AttentionDesc& a = d.attention;
  a.causal = chance(25), a.align = Align::kBottomRight;
  a.has_seqlens_q = chance(20), a.has_seqlens_k = chance(20);
  a.dropout_p = chance(15) ? 0.25 : 0;
  if (chance(15)) a.attn_mask = {true, DType::kBool, {1, 1, chance(50) ? d.seqlen_q : 1, d.seqlen_k}};
  if (chance(15)) a.attn_bias = {true, DType::kFloat32, {1, 1, 1, chance(50) ? d.seqlen_k : 1}};
  if (chance(15)) a.return_weights = chance(50) ? ReturnWeights::kPerHead : ReturnWeights::kMean;
  return d;
}

NormDesc random_norm(Random& random) {
  const Chance chance{random};
  return {static_cast<NormKind>(random.integer(0, 2)), chance(50), 1e-5, chance(80), chance(80)};
}

int64_t dim_of(int64_t projected, int64_t size) { return projected > 0 ? projected : size; }

std::string words(int64_t n, const LayerDesc& d) {
  return told(n, {{"B", d.batch},
                  {"N", d.beam},
                  {"N_kv", d.beam_kv},
                  {"Sq", d.seqlen_q},
                  {"Sk", d.seqlen_k},
                  {"H", d.num_heads},
                  {"G", d.num_heads_kv},
                  {"query_size", d.query_size},
                  {"key_size", d.key_size},
                  {"value_size", d.value_size},
                  {"query_proj", d.query_proj_size},
                  {"value_proj", d.value_proj_size},
                  {"out_proj", d.out_proj_size},
                  {"dtype", int64_t(d.dtype)}});
}

// Whether a call is little work. A query is visited where it has no keys or dims, too.
bool little_layer(const LayerDesc& d, int64_t factor) {
  const auto some = [](int64_t n) { return std::max<int64_t>(n, 1); };
  const int64_t D = dim_of(d.query_proj_size, d.query_size), Dv = dim_of(d.value_proj_size, d.value_size);
  const int64_t H = d.num_heads, G = d.num_heads_kv;
  // Lengths are looked at one by one, though they be one element.
  const bool has_lengths = d.attention.has_seqlens_q || d.attention.has_seqlens_k;
  if (has_lengths && !little_work({d.batch, d.beam})) return false;
  return little_work({factor, d.batch, d.beam, H, d.seqlen_q, some(d.seqlen_k), some(std::max(D, Dv))}) &&
         little_work({factor, d.batch, d.beam, d.seqlen_q, d.query_size, H, D}) &&
         little_work({factor, d.batch, d.beam_kv, d.seqlen_k, d.key_size, G, D}) &&
         little_work({factor, d.batch, d.beam_kv, d.seqlen_k, d.value_size, G, Dv}) &&
         little_work({factor, d.batch, d.beam, d.seqlen_q, H, Dv, some(d.out_proj_size)});
}

// Bytes that the activations of the layer take at least.
MemorySize activations(const LayerDesc& d) {
  const int64_t D = dim_of(d.query_proj_size, d.query_size), Dv = dim_of(d.value_proj_size, d.value_size);
  const MemorySize element = dtype_size_bytes(d.dtype), queries = MemorySize(d.batch) * d.beam * d.seqlen_q;
  const MemorySize keys = MemorySize(d.batch) * d.beam_kv * d.seqlen_k;
  MemorySize bytes = queries * d.num_heads * Dv * element + queries * d.num_heads * 4;  // O and L
  if (d.query_proj_size > 0) bytes += queries * d.num_heads * D * element;
  if (d.key_proj_size > 0) bytes += keys * d.num_heads_kv * D * element;
  if (d.value_proj_size > 0) bytes += keys * d.num_heads_kv * Dv * element;
  return bytes;
}

MemorySize parameters(const LayerDesc& d) {
  const int64_t D = d.query_proj_size, Dv = dim_of(d.value_proj_size, d.value_size);
  MemorySize elements = (MemorySize(d.query_size) * d.num_heads + MemorySize(d.key_size) * d.num_heads_kv) * D;
  if (d.value_proj_size > 0) elements += MemorySize(d.value_size) * d.num_heads_kv * Dv;
  return (elements + MemorySize(d.num_heads) * Dv * d.out_proj_size) * dtype_size_bytes(d.dtype);
}

// Workspace, reserve and packed weights of a call, if they are not too large.
struct CallMemory {
  std::unique_ptr<GuardedBytes> workspace, backward_workspace, reserve;

  template <class Made>
  bool take(const Made& made) {
    for (const auto& [to, bytes] :
         {std::pair(&workspace, made.workspace_bytes()),
          std::pair(&backward_workspace, made.backward_workspace_bytes()), std::pair(&reserve, made.reserve_bytes())}) {
      if (bytes > kMostBytes) return false;
      *to = std::make_unique<GuardedBytes>(bytes, Guard::kEnd, 0xff);
    }
    return true;
  }
  template <class Args>
  void give(Args* args, bool training, bool backward = false) const {
    const GuardedBytes& bytes = backward ? *backward_workspace : *workspace;
    args->workspace = bytes.data(), args->workspace_bytes = bytes.size();
    args->reserve = training ? reserve->data() : nullptr;
    args->reserve_bytes = training ? reserve->size() : 0;
  }
};

Tensor& weight(LayerWeights& weights, int kind) {
  Tensor* const all[] = {&weights.query,      &weights.key,      &weights.value,      &weights.out,
                         &weights.query_bias, &weights.key_bias, &weights.value_bias, &weights.out_bias};
  return *all[kind];
}

// The arrays of a layer, or of the attention block around it.
struct LayerArrays : FuzzArrays {
  const LayerDesc& d;
  const Layer& layer;
  std::array<int64_t, 1> lengths = {};

  LayerArrays(const LayerDesc& desc, const Layer& of) : d(desc), layer(of) {}

  Tensor integers(std::initializer_list<int64_t> dims) {
    Tensor t = input(DType::kInt64, dims);
    t.data = lengths.data();
    return t;
  }

  bool forward(bool in_block, LayerForwardArgs* args) {
    const int64_t B = d.batch, N = d.beam, Sq = d.seqlen_q, Sk = d.seqlen_k;
    args->query = input(d.dtype, {B, N, Sq, d.query_size});
    args->key = input(d.dtype, {B, d.beam_kv, Sk, d.key_size});
    args->value = input(d.dtype, {B, d.beam_kv, Sk, d.value_size});
    if (d.residual && !in_block) args->residual = input(d.dtype, {B, N, Sq, layer.out_size()});
    for (int kind = 0; kind < kNumWeightKinds; ++kind) {
      const WeightLayout layout = layer.weight_layout(static_cast<WeightKind>(kind));
      if (layout.present && layout.ndim == 1) weight(args->weights, kind) = input(d.dtype, {layout.dims[0]});
      if (layout.present && layout.ndim == 2) {
        weight(args->weights, kind) = input(d.dtype, {layout.dims[0], layout.dims[1]});
      }
    }
    const auto broadcast = [](const BroadcastOperand& o) {
      return o.given ? input(o.dtype, {o.dims[0], o.dims[1], o.dims[2], o.dims[3]}) : Tensor();
    };
    args->attn_mask = broadcast(d.attention.attn_mask), args->attn_bias = broadcast(d.attention.attn_bias);
    lengths[0] = std::min<int64_t>({Sq, Sk, 1});
    if (d.attention.has_seqlens_q) args->seqlens_q = integers({B, N});
    if (d.attention.has_seqlens_k) args->seqlens_k = integers({B, d.beam_kv});
    if (d.has_windows) args->window_lo = args->window_hi = integers({Sq});
    args->dropout_seed = 1, args->output_dropout_seed = 2;
    if (d.attention.return_weights == ReturnWeights::kPerHead &&
        !output(d.dtype, {B, N, d.num_heads, Sq, Sk}, &args->attn_weights)) {
      return false;
    }
    if (d.attention.return_weights == ReturnWeights::kMean && !output(d.dtype, {B, N, Sq, Sk}, &args->attn_weights)) {
      return false;
    }
    return output(d.dtype, {B, N, Sq, layer.out_size()}, &args->out);
  }

  // Those gradients that are not too large.
  template <class Args>
  void backward(const LayerForwardArgs& forward, Args* args) {
    args->grad_out = input(d.dtype, {d.batch, d.beam, d.seqlen_q, layer.out_size()});
    output_like(forward.query, &args->grad_query);
    output_like(forward.key, &args->grad_key);
    output_like(forward.value, &args->grad_value);
    if (d.attention.attn_bias.given) output_like(forward.attn_bias, &args->grad_attn_bias);
    LayerWeights weights = forward.weights;
    for (int kind = 0; kind < kNumWeightKinds; ++kind) {
      output_like(weight(weights, kind), &weight(args->grad_weights, kind));
    }
  }

  // The caches of an inference call, which then may be followed by one of one step.
  bool caches(LayerForwardArgs* args) {
    const auto cache = [&](int64_t projected, int64_t size, Tensor* to) {
      const int64_t heads = projected > 0 ? d.num_heads_kv : 1;
      return output(d.dtype, {d.batch, d.beam_kv, d.seqlen_k, heads, dim_of(projected, size)}, to);
    };
    return cache(d.key_proj_size, d.key_size, &args->key_cache) &&
           cache(d.value_proj_size, d.value_size, &args->value_cache);
  }
};

template <class Made>
bool pack(const Made& made, const LayerWeights& weights, const LayerDesc& d, std::unique_ptr<GuardedBytes>* packed) {
  if (made.prepacked_weights_bytes() > kMostBytes) return false;
  if (parameters(d) > MemorySize(kMostBytes)) return false;
  *packed = std::make_unique<GuardedBytes>(made.prepacked_weights_bytes(), Guard::kEnd, 0xff);
  const Status status = made.prepack_weights(weights, (*packed)->data(), (*packed)->size());
  EXPECT_TRUE(status.ok()) << status.message();
  return status.ok();
}

// Each of these runs what C++ or C made, `made`.
template <class AnyLayer>
void run(const AnyLayer& layer, const Layer& made, const LayerDesc& d, Figures* figures) {
  LayerArrays arrays(d, made);
  LayerForwardArgs args;
  CallMemory memory;
  if (!little_layer(d, 1) || !memory.take(layer) || !arrays.forward(false, &args)) return;
  memory.give(&args, true);
  Status status = layer.forward(args);
  ASSERT_TRUE(status.ok()) << status.message();
  ++figures->forward;

  LayerForwardArgs inference = args;
  memory.give(&inference, false);
  std::unique_ptr<GuardedBytes> packed;
  if (pack(layer, args.weights, d, &packed)) {
    inference.prepacked_weights = packed->data(), inference.prepacked_weights_bytes = packed->size();
  }
  const bool cached = arrays.caches(&inference);
  if (!cached) inference.key_cache = inference.value_cache = {};
  status = layer.forward(inference);
  ASSERT_TRUE(status.ok()) << status.message();
  if (cached && d.seqlen_q > 0) {
    inference.step = d.seqlen_q - 1;
    inference.key = inference.value = {};
    for (Tensor* t : {&inference.query, &inference.residual, &inference.out}) {
      if (t->given()) t->dims[2] = 1;
    }
    if (inference.attn_weights.given()) inference.attn_weights.dims[inference.attn_weights.ndim - 2] = 1;
    status = layer.forward(inference);
    ASSERT_TRUE(status.ok()) << status.message();
  }

  if (!little_layer(d, 16)) return;
  LayerBackwardArgs back;
  arrays.backward(args, &back);
  back.forward = args;
  memory.give(&back.forward, true, true);
  status = layer.backward_data(back);
  ASSERT_TRUE(status.ok()) << status.message();
  ++figures->backward;
  for (int kind = 0; kind < kNumWeightKinds; ++kind) {
    if (!weight(back.grad_weights, kind).given()) continue;
    status = layer.backward_weights(back);
    ASSERT_TRUE(status.ok()) << status.message();
    break;
  }
}

template <class AnyBlock>
void run(const AnyBlock& block, const AttentionBlock& made, const AttentionBlockDesc& desc, Figures* figures) {
  const LayerDesc& d = desc.layer;
  LayerArrays arrays(d, made.layer());
  AttentionBlockForwardArgs args;
  CallMemory memory;
  if (!little_layer(d, 1) || !memory.take(block) || !arrays.forward(true, &args.layer)) return;
  const int64_t size = desc.norm.pre ? d.query_size : made.layer().out_size();
  const bool normed = desc.norm.kind != NormKind::kNone;
  if (normed && desc.norm.gamma) args.norm.gamma = FuzzArrays::input(d.dtype, {size});
  if (normed && desc.norm.beta) args.norm.beta = FuzzArrays::input(d.dtype, {size});
  memory.give(&args.layer, true);
  Status status = block.forward(args);
  ASSERT_TRUE(status.ok()) << status.message();
  memory.give(&args.layer, false);
  status = block.forward(args);
  ASSERT_TRUE(status.ok()) << status.message();
  ++figures->forward;
  if (!little_layer(d, 16)) return;
  AttentionBlockBackwardArgs back;
  arrays.backward(args.layer, &back);
  arrays.output_like(args.norm.gamma, &back.grad_norm.gamma);
  arrays.output_like(args.norm.beta, &back.grad_norm.beta);
  back.forward = args;
  memory.give(&back.forward.layer, true, true);
  status = block.backward(back);
  ASSERT_TRUE(status.ok()) << status.message();
  ++figures->backward;
}

template <class AnyBlock>
void run(const AnyBlock& block, const FeedForwardBlock&, const FeedForwardBlockDesc& d, Figures* figures) {
  const int64_t most = std::max(d.size, d.inner_size), least = std::max<int64_t>(std::min(d.size, d.inner_size), 1);
  CallMemory memory;
  FuzzArrays arrays;
  FeedForwardBlockForwardArgs args;
  if (!little_work({d.batch, d.seqlen, most, least, 4})) return;
  if (!memory.take(block) || !arrays.output(d.dtype, {d.batch, d.seqlen, d.size}, &args.out)) return;
  args.x = FuzzArrays::input(d.dtype, {d.batch, d.seqlen, d.size});
  FeedForwardWeights& weights = args.weights;
  weights.weight1 = FuzzArrays::input(d.dtype, {d.size, d.inner_size});
  weights.weight2 = FuzzArrays::input(d.dtype, {d.inner_size, d.size});
  if (d.bias1) weights.bias1 = FuzzArrays::input(d.dtype, {d.inner_size});
  if (d.bias2) weights.bias2 = FuzzArrays::input(d.dtype, {d.size});
  const bool normed = d.norm.kind != NormKind::kNone;
  if (normed && d.norm.gamma) weights.norm.gamma = FuzzArrays::input(d.dtype, {d.size});
  if (normed && d.norm.beta) weights.norm.beta = FuzzArrays::input(d.dtype, {d.size});
  args.inner_dropout_seed = 1, args.output_dropout_seed = 2;
  memory.give(&args, true);
  Status status = block.forward(args);
  ASSERT_TRUE(status.ok()) << status.message();
  memory.give(&args, false);
  status = block.forward(args);
  ASSERT_TRUE(status.ok()) << status.message();
  ++figures->forward;
  FeedForwardBlockBackwardArgs back;
  back.forward = args;
  memory.give(&back.forward, true, true);
  back.grad_out = args.x;
  arrays.output_like(args.x, &back.grad_x);
  for (Tensor FeedForwardWeights::*of : {&FeedForwardWeights::weight1, &FeedForwardWeights::weight2,
                                         &FeedForwardWeights::bias1, &FeedForwardWeights::bias2}) {
    arrays.output_like(weights.*of, &(back.grad_weights.*of));
  }
  arrays.output_like(weights.norm.gamma, &back.grad_weights.norm.gamma);
  status = block.backward(back);
  ASSERT_TRUE(status.ok()) << status.message();
  ++figures->backward;
}

struct BothFigures {
  Figures all, through_c;
  BothFigures(const char* what, const char* what_through_c) : all(what), through_c(what_through_c) {}
};

// Makes it on every kernel that takes the dtype, and runs it; `least`: bytes of its reserve at least. The C interface must
// say the same, and runs it too.
template <class ThroughC, class Desc, class Make>
void make_and_run(const Desc& desc, DType dtype, MemorySize least, const Make& make, BothFigures* figures) {
  for (const Kernel* kernel : kernels_to_test()) {
    if (refuses(kernel->name, linear::find_kernel(kernel->name)->why_not(dtype))) continue;
    const auto made = make(desc, PlanOptions{.kernel = kernel->name});
    if (refused(made.status())) continue;
    ++figures->all.plans;
    if (!made.ok()) {
      ASSERT_NE(made.status().message(), "");
      ++figures->all.refused;
      continue;
    }
    ASSERT_TRUE(least.fits()) << kernel->name;
    ASSERT_GE(made->reserve_bytes(), least.value()) << kernel->name;
    ASSERT_LE(made->reserve_bytes(), size_t{PTRDIFF_MAX});
    ASSERT_LE(made->workspace_bytes(), size_t{PTRDIFF_MAX});
    ASSERT_LE(made->backward_workspace_bytes(), size_t{PTRDIFF_MAX});
    run(*made, *made, desc, &figures->all);
    if (::testing::Test::HasFatalFailure()) return;
  }
  const auto made = make(desc, PlanOptions());
  const ThroughC through_c(desc);
  ASSERT_EQ(through_c.made.code(), made.status().code());
  ASSERT_EQ(through_c.made.message(), made.status().message());
  ++figures->through_c.plans;
  if (!made.ok()) {
    ++figures->through_c.refused;
    return;
  }
  ASSERT_EQ(through_c.reserve_bytes(), made->reserve_bytes());
  ASSERT_EQ(through_c.workspace_bytes(), made->workspace_bytes());
  ASSERT_EQ(through_c.backward_workspace_bytes(), made->backward_workspace_bytes());
  run(through_c, *made, desc, &figures->through_c);
}

void expect_mostly_taken(const BothFigures& figures) {
  for (const Figures* of : {&figures.all, &figures.through_c}) EXPECT_GT(of->plans, 2 * of->refused) << of->of;
}

TEST(LayerSizes, NoLayerWrapsAndWhatItTakesRuns) {
  BothFigures figures("layers", "layers through C");
  fuzz(500, 3, [&](Random& random, int64_t n) {
    Sizes size(random);
    const LayerDesc d = random_layer(random, size);
    SCOPED_TRACE(words(n, d));
    make_and_run<LayerThroughC>(d, d.dtype, activations(d), layer, &figures);
    const Result<Layer> made = layer(d);
    if (!made.ok()) return;
    ASSERT_TRUE(parameters(d).fits());
    ASSERT_GE(made->weights_bytes(), parameters(d).value());
  });
  expect_mostly_taken(figures);
}

TEST(LayerSizes, NoAttentionBlockWrapsAndWhatItTakesRuns) {
  BothFigures figures("attention blocks", "attention blocks through C");
  fuzz(500, 4, [&](Random& random, int64_t n) {
    Sizes size(random);
    AttentionBlockDesc d = {random_layer(random, size), random_norm(random)};
    d.layer.residual = d.layer.residual && d.layer.out_proj_size == d.layer.query_size && d.layer.query_size > 0;
    SCOPED_TRACE(words(n, d.layer));
    make_and_run<AttentionBlockThroughC>(d, d.layer.dtype, activations(d.layer), attention_block, &figures);
  });
  expect_mostly_taken(figures);
}

TEST(LayerSizes, NoFeedForwardBlockWrapsAndWhatItTakesRuns) {
  BothFigures figures("feed-forward blocks", "feed-forward blocks through C");
  fuzz(500, 5, [&](Random& random, int64_t n) {
    const Chance chance{random};
    Sizes size(random);
    FeedForwardBlockDesc d;
    d.batch = size(), d.seqlen = size(), d.size = size(), d.inner_size = size();
    d.activation = static_cast<ActivationKind>(random.integer(0, 4));
    d.bias1 = chance(60), d.bias2 = chance(60), d.residual = chance(60);
    d.inner_dropout_p = chance(20) ? 0.25 : 0, d.output_dropout_p = chance(20) ? 0.25 : 0;
    d.norm = random_norm(random), d.dtype = random_dtype(random);
    SCOPED_TRACE(told(n, {{"B", d.batch}, {"S", d.seqlen}, {"size", d.size}, {"inner", d.inner_size}}));
    const MemorySize u = MemorySize(d.batch) * d.seqlen * d.inner_size * dtype_size_bytes(d.dtype);
    make_and_run<FeedForwardBlockThroughC>(d, d.dtype, u, feed_forward_block, &figures);
  });
  expect_mostly_taken(figures);
}

// However many rows, columns or beams there are of nothing: each of these once counted to 2^40.
TEST(LayerSizes, NothingToComputeEndsAtOnce) {
  constexpr int64_t kMany = int64_t{1} << 40;
  BothFigures figures("empty calls", "empty calls through C");
  LayerDesc no_batch;
  no_batch.batch = 0, no_batch.seqlen_q = no_batch.seqlen_k = 13;
  no_batch.query_size = no_batch.key_size = no_batch.out_proj_size = 4, no_batch.value_size = kMany;
  no_batch.query_proj_size = no_batch.key_proj_size = 2;
  LayerDesc no_queries;
  no_queries.beam = kMany, no_queries.seqlen_k = 2;
  no_queries.query_size = no_queries.key_size = no_queries.value_size = 4;
  for (const LayerDesc& d : {no_batch, no_queries}) make_and_run<LayerThroughC>(d, d.dtype, 0, layer, &figures);
  AttentionBlockDesc long_rows = {no_batch, {}};
  long_rows.layer.query_size = kMany;
  make_and_run<AttentionBlockThroughC>(long_rows, DType::kFloat32, 0, attention_block, &figures);
  FeedForwardBlockDesc empty_rows;
  empty_rows.batch = kMany, empty_rows.seqlen = 2, empty_rows.norm.kind = NormKind::kNone;
  make_and_run<FeedForwardBlockThroughC>(empty_rows, DType::kFloat32, 0, feed_forward_block, &figures);
  for (const Figures* of : {&figures.all, &figures.through_c}) {
    EXPECT_EQ(of->forward, of->plans);
    EXPECT_EQ(of->backward, of->plans);
  }
}

}  // namespace
}  // namespace polyhead::testing
