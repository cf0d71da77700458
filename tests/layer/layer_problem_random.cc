#include "layer_problem.h"

namespace polyhead::testing {
namespace {

void set_sizes(Random& random, LayerProblem& p) {
  LayerDesc& d = p.desc;
  const auto size = [&](int64_t most) { return random.chance(0.03) ? 0 : random.integer(1, most); };
  d.batch = size(3);
  d.beam = random.chance(0.3) ? random.integer(1, 3) : 1;
  d.beam_kv = random.chance(0.5) ? d.beam : 1;
  d.seqlen_q = size(random.chance(0.1) ? 90 : 18);
  d.seqlen_k = size(random.chance(0.1) ? 90 : 18);
  d.num_heads_kv = random.integer(1, 3);
  d.num_heads = d.num_heads_kv * random.integer(1, 3);
  d.query_size = size(20);
  d.key_size = random.chance(0.4) ? d.query_size : size(20);
  d.value_size = random.chance(0.6) ? d.key_size : size(20);
  const bool query_on = random.chance(0.8), key_on = random.chance(0.8);
  d.query_proj_size = query_on ? size(12) : 0;
  d.key_proj_size = key_on ? d.query_proj_size : 0;
  // Heads of q and k are as long.
  if (d.query_proj_size == 0 && d.key_proj_size == 0) d.key_size = d.query_size;
  if (d.query_proj_size == 0 && d.key_proj_size > 0) d.key_proj_size = d.query_size;
  if (d.query_proj_size > 0 && d.key_proj_size == 0) d.query_proj_size = d.key_size;
  if (d.query_proj_size == 0 && d.key_proj_size == 0) d.key_size = d.query_size;
  d.value_proj_size = random.chance(0.8) ? size(12) : 0;
  d.out_proj_size = random.chance(0.8) ? size(20) : 0;
  d.query_bias = d.query_proj_size > 0 && random.chance(0.5);
  d.key_bias = d.key_proj_size > 0 && random.chance(0.5);
  d.value_bias = d.value_proj_size > 0 && random.chance(0.5);
  d.out_bias = d.out_proj_size > 0 && random.chance(0.5);
}

void set_attention(Random& random, LayerDesc& d) {
  AttentionDesc& a = d.attention;
  a.causal = random.chance(0.3);
  if (random.chance(0.2)) a.window_left = random.integer(0, 9);
  if (random.chance(0.2)) a.window_right = random.integer(0, 9);
  switch (random.integer(0, 3)) {
    case 0: a.align = Align::kTopLeft; break;
    case 1: a.align = Align::kBottomRight; break;
    case 2: a.query_offset = random.integer(-3, 9); break;
    default: a.has_query_offsets = true; break;
  }
  if (random.chance(0.3)) a.scale = random.uniform();
  if (random.chance(0.2)) a.softcap = 1 + random.uniform();
  const auto dim = [&](int64_t full) { return random.chance(0.5) ? full : 1; };
  const auto operand = [&](DType dtype) {
    return BroadcastOperand{true, dtype, {dim(d.batch), dim(d.num_heads), dim(d.seqlen_q), dim(d.seqlen_k)}};
  };
  if (random.chance(0.25)) a.attn_mask = operand(DType::kBool);
  if (random.chance(0.25)) a.attn_bias = operand(DType::kFloat32);
  if (random.chance(0.2)) a.alibi_slopes_ndim = static_cast<int>(random.integer(1, 2));
  a.normalizer = random.chance(0.1) ? Normalizer::kNone : Normalizer::kSoftmax;
  a.has_sink_logits = a.normalizer == Normalizer::kSoftmax && random.chance(0.15);
  a.sink_keys = a.window_left >= 0 ? Random(d.seqlen_q, streams::kSinkKeys).integer(0, 4) : 0;
  a.has_seqlens_q = random.chance(0.25);
  a.has_seqlens_k = random.chance(0.25);
  if (random.chance(0.25)) a.dropout_p = 0.6 * random.uniform();
  a.return_weights = static_cast<ReturnWeights>(random.chance(0.3) ? random.integer(1, 2) : 0);
}

}  // namespace

LayerProblem random_layer_problem(uint64_t seed) {
  Random random(seed);
  LayerProblem p;
  p.name = "random layer " + std::to_string(seed);
  p.seed = seed;
  LayerDesc& d = p.desc;
  set_sizes(random, p);
  set_attention(random, d);
  d.residual = random.chance(0.4);
  d.has_windows = random.chance(0.2);
  if (random.chance(0.25)) d.output_dropout_p = 0.6 * random.uniform();
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
  d.dtype = kDTypes[random.integer(0, 4)];
  const bool same_tokens = d.beam == d.beam_kv && d.seqlen_q == d.seqlen_k;
  p.key_is_query = same_tokens && d.key_size == d.query_size && random.chance(0.7);
  p.value_is_key = d.value_size == d.key_size && (p.key_is_query || random.chance(0.7));
  p.separate_weights = random.chance(0.4);
  return p;
}

}  // namespace polyhead::testing
