#include "layer_problem.h"

#include <algorithm>
#include <cmath>

namespace polyhead::testing {
namespace {

Array random_array(Random& random, DType dtype, std::vector<int64_t> dims, double scale = 1) {
  Array array(dtype, std::move(dims));
  for (int64_t n = 0; n < array.size(); ++n) array.set(n, scale * random.normal());
  return array;
}

Array random_integers(Random& random, DType dtype, std::vector<int64_t> dims, int64_t first, int64_t last) {
  Array array(dtype, std::move(dims));
  for (int64_t n = 0; n < array.size(); ++n) array.set(n, static_cast<double>(random.integer(first, last)));
  return array;
}

void set_windows(Random& random, const LayerDesc& d, LayerInputs& in) {
  in.window_lo = Array(DType::kInt32, {d.seqlen_q});
  in.window_hi = Array(DType::kInt64, {d.seqlen_q});
  for (int64_t i = 0; i < d.seqlen_q; ++i) {
    const int64_t lo = random.integer(-3, d.seqlen_k);  // out of range, and empty, are legal
    in.window_lo.set(i, static_cast<double>(lo));
    in.window_hi.set(i, static_cast<double>(lo + random.integer(0, d.seqlen_k + 4)));
  }
}

void set_options(Random& random, const LayerDesc& d, LayerInputs& in) {
  const AttentionDesc& a = d.attention;
  if (a.attn_mask.given) {
    in.attn_mask = Array(DType::kBool, std::vector<int64_t>(a.attn_mask.dims, a.attn_mask.dims + 4));
    for (int64_t n = 0; n < in.attn_mask.size(); ++n) in.attn_mask.set(n, random.chance(0.7));
  }
  if (a.attn_bias.given) {
    in.attn_bias =
        random_array(random, a.attn_bias.dtype, std::vector<int64_t>(a.attn_bias.dims, a.attn_bias.dims + 4));
    for (int64_t n = 0; n < in.attn_bias.size(); ++n) {
      if (random.chance(0.05)) in.attn_bias.set(n, -HUGE_VAL);
    }
  }
  if (a.alibi_slopes_ndim == 1) in.alibi_slopes = random_array(random, DType::kFloat32, {d.num_heads}, 0.1);
  if (a.alibi_slopes_ndim == 2) in.alibi_slopes = random_array(random, DType::kFloat32, {d.batch, d.num_heads}, 0.1);
  if (a.has_sink_logits) {
    in.sink_logits = random_array(random, d.dtype == DType::kFloat64 ? d.dtype : DType::kFloat32, {d.num_heads});
  }
  if (a.has_seqlens_q) in.seqlens_q = random_integers(random, DType::kInt32, {d.batch, d.beam}, 0, d.seqlen_q);
  if (a.has_seqlens_k) in.seqlens_k = random_integers(random, DType::kInt64, {d.batch, d.beam_kv}, 0, d.seqlen_k);
  if (a.has_query_offsets) in.query_offsets = random_integers(random, DType::kInt32, {d.batch, d.beam}, -2, d.seqlen_k);
  if (d.has_windows) set_windows(random, d, in);
}

// Three self-attention layers that differ in their heads, and one of everything different.
LayerDesc self_attention(int64_t batch, int64_t seqlen, int64_t heads, int64_t heads_kv, int64_t dim) {
  LayerDesc d;
  d.batch = batch;
  d.seqlen_q = d.seqlen_k = seqlen;
  d.num_heads = heads;
  d.num_heads_kv = heads_kv;
  d.query_size = d.key_size = d.value_size = d.out_proj_size = heads * dim;
  d.query_proj_size = d.key_proj_size = d.value_proj_size = dim;
  return d;
}

LayerDesc cross_attention(int64_t batch, int64_t seqlen_q, int64_t seqlen_k) {
  LayerDesc d;
  d.batch = batch;
  d.seqlen_q = seqlen_q;
  d.seqlen_k = seqlen_k;
  d.num_heads = 4;
  d.num_heads_kv = 2;
  d.query_size = 10, d.key_size = 7, d.value_size = 12, d.out_proj_size = 9;
  d.query_proj_size = d.key_proj_size = 6;
  d.value_proj_size = 5;
  return d;
}

void set_biases(LayerDesc& d) { d.query_bias = d.key_bias = d.value_bias = d.out_bias = true; }

class Problems {
 public:
  std::vector<LayerProblem> list;

  // A problem, to be varied by `change`.
  template <class Change>
  void add(const char* name, const LayerDesc& desc, Change change) {
    LayerProblem p;
    p.name = name;
    p.desc = desc;
    p.seed = list.size() + 1;
    change(p);
    list.push_back(p);
  }
};

void one_tensor(LayerProblem& p) { p.key_is_query = p.value_is_key = true; }

void add_projections(Problems& all) {
  all.add("self", self_attention(2, 9, 4, 4, 8), one_tensor);
  all.add("self_with_biases", self_attention(2, 33, 4, 2, 8), [](auto& p) { one_tensor(p), set_biases(p.desc); });
  all.add("self_separate_weights", self_attention(1, 17, 2, 2, 16), [](auto& p) {
    one_tensor(p), set_biases(p.desc);
    p.separate_weights = true;
  });
  all.add("self_three_tensors", self_attention(2, 5, 2, 1, 8), [](auto& p) { p.desc.key_bias = true; });
  all.add("self_some_biases", self_attention(2, 5, 2, 1, 8), [](auto& p) {
    one_tensor(p);
    p.desc.query_bias = p.desc.out_bias = true;
  });
  all.add("cross", cross_attention(2, 5, 11), [](auto&) {});
  all.add("cross_separate", cross_attention(2, 5, 11), [](auto& p) { set_biases(p.desc), p.separate_weights = true; });
  all.add("cross_key_value", cross_attention(3, 4, 9), [](auto& p) {
    p.value_is_key = true;
    p.desc.value_size = p.desc.key_size;
    p.desc.key_bias = p.desc.value_bias = p.desc.residual = true;
  });
  all.add("no_query_projection", cross_attention(2, 6, 7), [](auto& p) {
    p.desc.query_proj_size = 0;
    p.desc.key_proj_size = p.desc.query_size;
  });
  all.add("no_key_projection", cross_attention(2, 6, 7), [](auto& p) {
    p.desc.key_proj_size = 0;
    p.desc.query_proj_size = p.desc.key_size;
    p.desc.value_bias = true;
  });
  all.add("no_value_projection", cross_attention(2, 6, 7), [](auto& p) { p.desc.value_proj_size = 0; });
  all.add("no_out_projection", cross_attention(2, 6, 7), [](auto& p) { p.desc.out_proj_size = 0; });
  all.add("no_out_projection_residual", cross_attention(2, 6, 7), [](auto& p) {
    p.desc.out_proj_size = 0;
    p.desc.residual = true;
    p.desc.output_dropout_p = 0.3;
  });
  all.add("no_projection", self_attention(2, 7, 3, 3, 4), [](auto& p) {
    one_tensor(p);
    p.desc.query_proj_size = p.desc.key_proj_size = p.desc.value_proj_size = p.desc.out_proj_size = 0;
  });
  all.add("only_value_projection", self_attention(2, 7, 2, 2, 4), [](auto& p) {
    one_tensor(p);
    p.desc.query_proj_size = p.desc.key_proj_size = p.desc.out_proj_size = 0;
  });
}

void add_options(Problems& all) {
  all.add("causal", self_attention(2, 13, 2, 2, 8), [](auto& p) { one_tensor(p), p.desc.attention.causal = true; });
  all.add("bottom_right_window", cross_attention(2, 6, 9), [](auto& p) {
    p.desc.attention.window_left = 3;
    p.desc.attention.causal = true;
    p.desc.attention.align = Align::kBottomRight;
  });
  all.add("offset_softcap_scale", cross_attention(2, 6, 9), [](auto& p) {
    p.desc.attention.window_right = 2;
    p.desc.attention.has_query_offsets = true;
    p.desc.attention.softcap = 1.5;
    p.desc.attention.scale = 0.6;
  });
  all.add("windows", cross_attention(2, 8, 11), [](auto& p) { p.desc.has_windows = true; });
  all.add("windows_and_mask", cross_attention(2, 8, 11), [](auto& p) {
    p.desc.has_windows = p.desc.out_bias = true;
    p.desc.attention.attn_mask = {true, DType::kBool, {2, 1, 1, 11}};
  });
  all.add("mask_bias_alibi", cross_attention(2, 8, 11), [](auto& p) {
    p.desc.attention.attn_mask = {true, DType::kBool, {1, 4, 8, 11}};
    p.desc.attention.attn_bias = {true, DType::kFloat32, {2, 1, 8, 11}};
    p.desc.attention.alibi_slopes_ndim = 1;
    p.desc.attention.align = Align::kTopLeft;
  });
  all.add("sinks", cross_attention(3, 8, 11), [](auto& p) {
    p.desc.attention.has_sink_logits = p.desc.attention.has_seqlens_q = p.desc.attention.has_seqlens_k = true;
    p.desc.beam = 2;
  });
  all.add("none", self_attention(3, 10, 4, 2, 8), [](auto& p) {
    one_tensor(p), set_biases(p.desc);
    p.desc.attention.normalizer = Normalizer::kNone;
    p.desc.attention.causal = p.desc.attention.has_seqlens_k = p.desc.residual = true;
    p.desc.attention.align = Align::kTopLeft;
    p.desc.attention.dropout_p = 0.2;
  });
  all.add("lengths", cross_attention(3, 8, 11), [](auto& p) {
    p.desc.attention.has_seqlens_q = p.desc.attention.has_seqlens_k = p.desc.residual = true;
    set_biases(p.desc);
  });
  all.add("self_lengths", self_attention(3, 10, 2, 2, 8), [](auto& p) {
    one_tensor(p), set_biases(p.desc);
    p.desc.attention.has_seqlens_q = p.desc.attention.has_seqlens_k = true;
  });
  all.add("self_key_lengths", self_attention(3, 10, 2, 2, 8), [](auto& p) {
    one_tensor(p), set_biases(p.desc);
    p.desc.attention.has_seqlens_k = true;
    p.desc.output_dropout_p = 0.2;
  });
  all.add("dropouts", self_attention(2, 12, 2, 2, 8), [](auto& p) {
    one_tensor(p), set_biases(p.desc);
    p.desc.residual = true;
    p.desc.attention.dropout_p = 0.25;
    p.desc.output_dropout_p = 0.4;
  });
  all.add("dropouts_lengths", cross_attention(2, 7, 9), [](auto& p) {
    p.desc.out_bias = p.desc.attention.has_seqlens_q = true;
    p.desc.attention.dropout_p = 0.5;
    p.desc.output_dropout_p = 0.5;
  });
  all.add("weights_per_head", cross_attention(2, 6, 7),
          [](auto& p) { p.desc.attention.return_weights = ReturnWeights::kPerHead; });
  all.add("weights_mean", cross_attention(2, 6, 7), [](auto& p) {
    p.desc.attention.return_weights = ReturnWeights::kMean;
    p.desc.attention.dropout_p = 0.2;
  });
}

void add_beams(Problems& all) {
  all.add("beams", cross_attention(2, 5, 8), [](auto& p) {
    p.desc.beam = p.desc.beam_kv = 3;
    set_biases(p.desc);
    p.desc.attention.attn_bias = {true, DType::kFloat32, {1, 4, 5, 8}};
    p.desc.attention.has_seqlens_k = true;
  });
  all.add("self_beams", self_attention(2, 6, 2, 1, 8), [](auto& p) {
    one_tensor(p);
    p.desc.beam = p.desc.beam_kv = 2;
    p.desc.attention.dropout_p = p.desc.output_dropout_p = 0.3;
    p.desc.attention.return_weights = ReturnWeights::kPerHead;
  });
  all.add("shared_beams", cross_attention(2, 5, 8), [](auto& p) {
    p.desc.beam = 3;
    p.desc.residual = p.desc.has_windows = true;
    p.desc.attention.alibi_slopes_ndim = 2;
    p.desc.attention.align = Align::kBottomRight;
    p.desc.attention.has_seqlens_q = p.desc.attention.has_seqlens_k = true;
    p.desc.attention.return_weights = ReturnWeights::kMean;
  });
  all.add("shared_beams_no_key_projection", cross_attention(1, 4, 6), [](auto& p) {
    p.desc.beam = 2;
    p.desc.key_proj_size = p.desc.value_proj_size = 0;
    p.desc.query_proj_size = p.desc.key_size;
  });
}

void add_edges(Problems& all) {
  all.add("tiles", self_attention(1, 130, 2, 2, 64), [](auto& p) { one_tensor(p), set_biases(p.desc); });
  all.add("one_token", self_attention(1, 1, 1, 1, 1), one_tensor);
  all.add("no_keys", cross_attention(2, 3, 0), [](auto& p) { set_biases(p.desc), p.desc.residual = true; });
  all.add("no_queries", cross_attention(2, 0, 3), [](auto& p) { set_biases(p.desc); });
  all.add("no_batch", cross_attention(0, 3, 3), [](auto& p) { set_biases(p.desc); });
  all.add("no_heads_no_out_projection", cross_attention(2, 3, 4),
          [](auto& p) { p.desc.num_heads = p.desc.num_heads_kv = p.desc.out_proj_size = 0; });
  all.add("no_values_no_out_projection", cross_attention(2, 3, 4),
          [](auto& p) { p.desc.value_size = p.desc.value_proj_size = p.desc.out_proj_size = 0; });
  all.add("empty_inputs", cross_attention(2, 3, 4), [](auto& p) {
    p.desc.query_size = p.desc.value_size = 0;
    set_biases(p.desc);
  });
}

}  // namespace

int64_t head_dim_of(const LayerDesc& d) { return d.query_proj_size > 0 ? d.query_proj_size : d.query_size; }
int64_t head_dim_v_of(const LayerDesc& d) { return d.value_proj_size > 0 ? d.value_proj_size : d.value_size; }
int64_t out_size_of(const LayerDesc& d) {
  return d.out_proj_size > 0 ? d.out_proj_size : d.num_heads * head_dim_v_of(d);
}

std::vector<int64_t> weight_dims(const LayerDesc& d, WeightKind kind) {
  const auto matrix = [](int64_t in, int64_t heads, int64_t size) {
    return size > 0 ? std::vector<int64_t>{in, heads * size} : std::vector<int64_t>();
  };
  const auto bias = [](bool given, int64_t size) {
    return given ? std::vector<int64_t>{size} : std::vector<int64_t>();
  };
  switch (kind) {
    case WeightKind::kQuery: return matrix(d.query_size, d.num_heads, d.query_proj_size);
    case WeightKind::kKey: return matrix(d.key_size, d.num_heads_kv, d.key_proj_size);
    case WeightKind::kValue: return matrix(d.value_size, d.num_heads_kv, d.value_proj_size);
    case WeightKind::kOut: return matrix(d.num_heads * head_dim_v_of(d), 1, d.out_proj_size);
    case WeightKind::kQueryBias: return bias(d.query_bias, d.num_heads * d.query_proj_size);
    case WeightKind::kKeyBias: return bias(d.key_bias, d.num_heads_kv * d.key_proj_size);
    case WeightKind::kValueBias: return bias(d.value_bias, d.num_heads_kv * d.value_proj_size);
    case WeightKind::kOutBias: break;
  }
  return bias(d.out_bias, d.out_proj_size);
}

LayerInputs random_inputs(const LayerProblem& p) {
  const LayerDesc& d = p.desc;
  Random random(p.seed);
  LayerInputs in;
  const std::vector<int64_t> out = {d.batch, d.beam, d.seqlen_q, out_size_of(d)};
  in.query = random_array(random, d.dtype, {d.batch, d.beam, d.seqlen_q, d.query_size});
  in.key = p.key_is_query ? in.query : random_array(random, d.dtype, {d.batch, d.beam_kv, d.seqlen_k, d.key_size});
  in.value = p.value_is_key ? in.key : random_array(random, d.dtype, {d.batch, d.beam_kv, d.seqlen_k, d.value_size});
  if (d.residual) in.residual = random_array(random, d.dtype, out);
  for (int kind = 0; kind < kNumWeightKinds; ++kind) {
    const std::vector<int64_t> dims = weight_dims(d, static_cast<WeightKind>(kind));
    if (dims.empty()) continue;
    const double scale = dims.size() == 2 ? 1 / std::sqrt(static_cast<double>(std::max<int64_t>(dims[0], 1))) : 0.3;
    in.weights[static_cast<size_t>(kind)] = random_array(random, d.dtype, dims, scale);
  }
  set_options(random, d, in);
  in.dropout_seed = random.bits();
  in.output_dropout_seed = random.bits();
  in.dropout_offset = static_cast<uint32_t>(random.bits());
  in.output_dropout_offset = static_cast<uint32_t>(random.bits());
  in.grad_out = random_array(random, d.dtype, out);
  return in;
}

std::vector<LayerProblem> layer_problems() {
  Problems all;
  add_projections(all);
  add_options(all);
  add_beams(all);
  add_edges(all);
  return all.list;
}

}  // namespace polyhead::testing
