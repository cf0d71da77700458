#include "mha_operands.h"

#include <algorithm>
#include <cmath>

#include "new_tensors.h"

namespace polyhead::tools {
namespace {

// [batch, beam, time, vector] in the order of --data-layout.
Status add_data(NewTensors& tensors, const MhaProblem& problem, int64_t beams, int64_t steps, int64_t size,
                Tensor& tensor) {
  int order[3] = {};
  for (size_t i = 0; i < 3; ++i) {
    const char letter = problem.data_layout[i];
    order[i] = letter == 'n' ? 0 : letter == 'b' ? 1 : 2;
  }
  return tensors.add(problem.attention.desc.dtype, {problem.layer.batch, beams, steps, size},
                     {order[0], order[1], order[2], 3}, tensor);
}

class Drawing {
 public:
  Drawing(const MhaProblem& problem, const Layer& layer, MhaOperands& operands)
      : problem_(problem), desc_(problem.layer), layer_(layer), operands_(operands), tensors_(operands.buffers) {}

  Status draw() {
    Status s = draw_data();
    if (s.ok()) s = draw_weights();
    if (s.ok() && desc_.has_windows) s = draw_windows();
    return s.ok() ? draw_options() : s;
  }

 private:
  uint64_t seed() const { return problem_.attention.seed; }

  Status draw_data() {
    LayerForwardArgs& args = operands_.args;
    const auto add = [&](int64_t beams, int64_t steps, int64_t size, Tensor& tensor, streams::Stream stream) {
      Status s = add_data(tensors_, problem_, beams, steps, size, tensor);
      Random random(seed(), stream);
      if (s.ok()) fill(tensor, [&] { return random.normal(); });
      return s;
    };
    Status s = add(desc_.beam, desc_.seqlen_q, desc_.query_size, args.query, streams::kQueryData);
    args.key = args.query;
    if (s.ok() && !problem_.key_is_query) {
      s = add(desc_.beam_kv, desc_.seqlen_k, desc_.key_size, args.key, streams::kKeyData);
    }
    args.value = args.key;
    if (s.ok() && !problem_.value_is_key) {
      s = add(desc_.beam_kv, desc_.seqlen_k, desc_.value_size, args.value, streams::kValueData);
    }
    if (s.ok() && desc_.residual) {
      s = add(desc_.beam, desc_.seqlen_q, layer_.out_size(), args.residual, streams::kResidualData);
    }
    if (s.ok() && problem_.training) {
      s = add(desc_.beam, desc_.seqlen_q, layer_.out_size(), operands_.grad_out, streams::kGradOutData);
    }
    return s;
  }

  Status draw_weights() {
    const size_t size_bytes = layer_.weights_bytes();
    operands_.buffers.push_back(new_buffer(size_bytes));
    if (operands_.buffers.back() == nullptr) return too_large(static_cast<double>(size_bytes));
    operands_.args.weights = layer_.weights_in(operands_.buffers.back().get());
    for (size_t kind = 0; kind < kNumWeightKinds; ++kind) {
      const Tensor& weight = operands_.args.weights.*kWeightFields[kind].field;
      if (!weight.given()) continue;
      const auto rows = static_cast<double>(std::max<int64_t>(weight.dims[0], 1));
      const double scale = weight.ndim == 2 ? 1 / std::sqrt(rows) : 0.3;
      Random random(seed(), streams::kWeightsData + kind);
      fill(weight, [&] { return scale * random.normal(); });
    }
    return {};
  }

  // Also windows that are empty or reach beyond the keys, which are legal.
  Status draw_windows() {
    LayerForwardArgs& args = operands_.args;
    if (Status s = tensors_.add(DType::kInt32, {desc_.seqlen_q}, args.window_lo); !s.ok()) return s;
    if (Status s = tensors_.add(DType::kInt64, {desc_.seqlen_q}, args.window_hi); !s.ok()) return s;
    Random random(seed(), streams::kWindows);
    std::vector<double> lows;
    fill(args.window_lo, [&] {
      lows.push_back(static_cast<double>(random.below(desc_.seqlen_k + 4) - 3));
      return lows.back();
    });
    size_t i = 0;
    fill(args.window_hi, [&] { return lows[i++] + static_cast<double>(random.below(desc_.seqlen_k + 5)); });
    return {};
  }

  Status add_lengths(const std::vector<int64_t>& lengths, Tensor& tensor) {
    if (lengths.empty()) return {};
    if (Status s = tensors_.add(DType::kInt64, {desc_.batch}, tensor); !s.ok()) return s;
    size_t i = 0;
    fill(tensor, [&] { return static_cast<double>(lengths[i++]); });
    return {};
  }

  // Masks, bias, slopes, lengths and offsets, as those of attention alone.
  Status draw_options() {
    LayerForwardArgs& args = operands_.args;
    ForwardArgs preset;
    preset.query = args.query;
    preset.key = args.key;
    preset.value = args.value;
    if (Status s = add_lengths(problem_.seqlens_q, preset.seqlens_q); !s.ok()) return s;
    if (Status s = add_lengths(problem_.seqlens_k, preset.seqlens_k); !s.ok()) return s;
    operands_.options = random_inputs(problem_.attention, preset);
    const ForwardArgs options = dense_args(operands_.options);
    args.attn_mask = options.attn_mask;
    args.attn_bias = options.attn_bias;
    args.alibi_slopes = options.alibi_slopes;
    args.sink_logits = options.sink_logits;
    for (const Array& capture : operands_.options.captures) operands_.captures.push_back(view(capture));
    args.captures = operands_.captures;
    args.seqlens_q = preset.seqlens_q.given() ? preset.seqlens_q : options.seqlens_q;
    args.seqlens_k = preset.seqlens_k.given() ? preset.seqlens_k : options.seqlens_k;
    args.query_offsets = options.query_offsets;
    args.dropout_seed = seed();
    args.output_dropout_seed = seed() + 1;
    return {};
  }

  const MhaProblem& problem_;
  const LayerDesc& desc_;
  const Layer& layer_;
  MhaOperands& operands_;
  NewTensors tensors_;
};

// One place of a dim.
Tensor slice(Tensor tensor, int dim, int64_t at) {
  if (!tensor.given()) return tensor;
  tensor.dims[dim] = 1;
  tensor.data =
      static_cast<char*>(tensor.data) + at * tensor.strides[dim] * static_cast<int64_t>(dtype_size_bytes(tensor.dtype));
  return tensor;
}

Status add_gradients(const MhaProblem& problem, NewTensors& tensors, MhaResults& results) {
  const LayerDesc& layer = problem.layer;
  const AttentionDesc& desc = problem.attention.desc;
  auto& of = results.of;
  Status s = add_data(tensors, problem, layer.beam, layer.seqlen_q, layer.query_size, of[kLayerGradQuery]);
  if (s.ok() && !problem.key_is_query) {
    s = add_data(tensors, problem, layer.beam_kv, layer.seqlen_k, layer.key_size, of[kLayerGradKey]);
  }
  if (s.ok() && !problem.value_is_key) {
    s = add_data(tensors, problem, layer.beam_kv, layer.seqlen_k, layer.value_size, of[kLayerGradValue]);
  }
  if (s.ok() && desc.attn_bias.given) {
    const int64_t* n = desc.attn_bias.dims;
    s = tensors.add(desc.attn_bias.dtype, {n[0], n[1], n[2], n[3]}, of[kLayerGradAttnBias]);
  }
  if (s.ok() && desc.alibi_slopes_ndim == 1) {
    s = tensors.add(DType::kFloat32, {desc.num_heads}, of[kLayerGradAlibiSlopes]);
  }
  if (s.ok() && desc.alibi_slopes_ndim == 2) {
    s = tensors.add(DType::kFloat32, {desc.batch, desc.num_heads}, of[kLayerGradAlibiSlopes]);
  }
  if (s.ok() && desc.has_sink_logits) {
    const DType sums = desc.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    s = tensors.add(sums, {desc.num_heads}, of[kLayerGradSinkLogits]);
  }
  for (size_t n = 0; n < desc.captures.size() && s.ok(); ++n) {
    if (has_gradient(desc.captures[n].dtype)) s = tensors.add(desc.captures[n], of[kLayerGradCaptures + n]);
  }
  return s;
}

}  // namespace

Result<MhaOperands> random_operands(const MhaProblem& problem, const Layer& layer) {
  MhaOperands operands;
  if (Status s = Drawing(problem, layer, operands).draw(); !s.ok()) return s;
  return operands;
}

LayerWeights MhaResults::grad_weights() const {
  LayerWeights weights;
  for (size_t kind = 0; kind < kNumWeightKinds; ++kind) {
    weights.*kWeightFields[kind].field = of[kLayerGradWeights + kind];
  }
  return weights;
}

void MhaResults::clear() const {
  for (const Tensor& tensor : of) fill(tensor, [] { return NAN; });
}

Result<MhaResults> new_results(const MhaProblem& problem, const Layer& layer) {
  MhaResults results;
  auto& of = results.of;
  const AttentionDesc& desc = problem.attention.desc;
  const int64_t B = desc.batch, N = problem.layer.beam, H = desc.num_heads, Sq = desc.seqlen_q, Sk = desc.seqlen_k;
  NewTensors tensors(results.buffers);
  Status s = add_data(tensors, problem, N, Sq, layer.out_size(), of[kLayerOut]);
  if (s.ok() && desc.return_weights == ReturnWeights::kPerHead) {
    s = tensors.add(desc.dtype, {B, N, H, Sq, Sk}, {0, 1, 2, 3, 4}, of[kLayerAttnWeights]);
  }
  if (s.ok() && desc.return_weights == ReturnWeights::kMean) {
    s = tensors.add(desc.dtype, {B, N, Sq, Sk}, of[kLayerAttnWeights]);
  }
  if (s.ok() && problem.training) s = add_gradients(problem, tensors, results);
  if (!s.ok()) return s;
  if (problem.training) {
    results.buffers.push_back(new_buffer(layer.weights_bytes()));
    if (results.buffers.back() == nullptr) return too_large(static_cast<double>(layer.weights_bytes()));
    const LayerWeights weights = layer.weights_in(results.buffers.back().get());
    for (size_t kind = 0; kind < kNumWeightKinds; ++kind) {
      of[kLayerGradWeights + kind] = weights.*kWeightFields[kind].field;
    }
  }
  results.clear();
  for (size_t kind = 0; kind < kNumWeightKinds && problem.attention.accumulate; ++kind) {
    Random random(problem.attention.seed, streams::kGradientsData + kNumGradients + kind);
    fill(of[kLayerGradWeights + kind], [&] { return random.normal(); });
  }
  return results;
}

Result<MhaCalls> MhaCalls::create(const MhaProblem& problem, const Layer& layer, const MhaOperands& operands,
                                  const MhaResults& results) {
  MhaCalls calls(layer);
  LayerForwardArgs& forward = calls.forward_;
  forward = operands.args;
  forward.out = results.of[kLayerOut];
  forward.attn_weights = results.of[kLayerAttnWeights];
  forward.workspace_bytes = layer.workspace_bytes();
  if (problem.training) {
    forward.workspace_bytes = std::max(layer.workspace_bytes(), layer.backward_workspace_bytes());
    forward.reserve_bytes = layer.reserve_bytes();
    if (Status s = calls.add_memory(forward.reserve_bytes, &forward.reserve); !s.ok()) return s;
  }
  if (Status s = calls.add_memory(forward.workspace_bytes, &forward.workspace); !s.ok()) return s;
  if (problem.sweep) {
    if (Status s = calls.add_caches(problem); !s.ok()) return s;
  }
  if (problem.prepacked_weights) {
    if (Status s = calls.prepack_weights(); !s.ok()) return s;
  }
  if (!problem.training) return calls;
  LayerBackwardArgs& backward = calls.backward_;
  backward.forward = forward;
  backward.grad_out = operands.grad_out;
  backward.grad_query = results.of[kLayerGradQuery];
  backward.grad_key = problem.key_is_query ? backward.grad_query : results.of[kLayerGradKey];
  backward.grad_value = problem.value_is_key ? backward.grad_key : results.of[kLayerGradValue];
  backward.grad_attn_bias = results.of[kLayerGradAttnBias];
  backward.grad_alibi_slopes = results.of[kLayerGradAlibiSlopes];
  backward.grad_sink_logits = results.of[kLayerGradSinkLogits];
  for (size_t n = 0; n < forward.captures.size(); ++n) {
    calls.grad_captures_.push_back(results.of[kLayerGradCaptures + n]);
  }
  backward.grad_captures = calls.grad_captures_;
  backward.grad_weights = results.grad_weights();
  backward.accumulate = problem.attention.accumulate;
  for (const WeightField& weight : kWeightFields) {
    calls.has_weights_ = calls.has_weights_ || (backward.grad_weights.*weight.field).given();
  }
  return calls;
}

Status MhaCalls::sweep() const {
  const int weights_dim = forward_.attn_weights.ndim - 2;  // of the time steps
  for (int64_t step = 0; step < layer_.desc().seqlen_q; ++step) {
    LayerForwardArgs one = forward_;
    one.step = step;
    one.query = slice(forward_.query, 2, step);
    one.key = one.value = {};
    one.residual = slice(forward_.residual, 2, step);
    one.out = slice(forward_.out, 2, step);
    one.attn_weights = slice(forward_.attn_weights, weights_dim, step);
    if (Status s = layer_.forward(one); !s.ok()) return s;
  }
  return {};
}

Status MhaCalls::run(const MhaProblem& problem) const {
  if (Status s = forward(); !s.ok()) return s;
  if (problem.sweep) {
    for (const Tensor* written : {&forward_.out, &forward_.attn_weights}) fill(*written, [] { return NAN; });
    return sweep();
  }
  if (!problem.training) return {};
  if (Status s = backward_data(); !s.ok()) return s;
  return backward_weights();
}

Status MhaCalls::add_memory(size_t size_bytes, void** memory) {
  buffers_.push_back(new_buffer(size_bytes));
  if (buffers_.back() == nullptr) return too_large(static_cast<double>(size_bytes));
  *memory = buffers_.back().get();
  return {};
}

Status MhaCalls::prepack_weights() {
  void* packed = nullptr;
  forward_.prepacked_weights_bytes = layer_.prepacked_weights_bytes();
  if (Status s = add_memory(forward_.prepacked_weights_bytes, &packed); !s.ok()) return s;
  forward_.prepacked_weights = packed;
  return layer_.prepack_weights(forward_.weights, packed, forward_.prepacked_weights_bytes);
}

Status MhaCalls::add_caches(const MhaProblem& problem) {
  const LayerDesc& desc = problem.layer;
  const AttentionDesc& attention = problem.attention.desc;
  NewTensors tensors(buffers_);
  const auto add = [&](int64_t projected, int64_t dim, Tensor& cache) {
    const int64_t heads = projected > 0 ? desc.num_heads_kv : 1;
    return tensors.add(attention.dtype, {desc.batch, desc.beam_kv, desc.seqlen_k, heads, dim}, {0, 1, 2, 3, 4}, cache);
  };
  if (Status s = add(desc.key_proj_size, attention.head_dim, forward_.key_cache); !s.ok()) return s;
  return add(desc.value_proj_size, attention.head_dim_v, forward_.value_cache);
}

}  // namespace polyhead::tools
