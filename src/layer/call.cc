#include "layer/call.h"

#include "contract/sequences.h"

namespace polyhead {
namespace {

// Lengths [batch] of all beams: the same for each.
Tensor with_beams(const Tensor& t, int64_t beams) {
  if (t.ndim != 1) return t;
  Tensor all = t;
  all.ndim = 2;
  all.dims[1] = beams;
  all.strides[1] = 0;
  return all;
}

// Time step i alone; a tensor with one step for all is its own.
Tensor at_step(const Tensor& t, int dim, int64_t i) {
  Tensor one = t;
  if (!t.given() || t.dims[dim] <= 1) return one;
  one.dims[dim] = 1;
  if (t.num_elements() > 0) {
    one.data = static_cast<char*>(t.data) + i * t.strides[dim] * static_cast<int64_t>(dtype_size_bytes(t.dtype));
  }
  return one;
}

// [B, N, S, heads, dim] in rows of `row_stride` elements.
Tensor rows_of_heads(void* data, DType dtype, const int64_t (&dims)[5], int64_t row_stride) {
  Tensor t(data, dtype, {dims[0], dims[1], dims[2], dims[3], dims[4]});
  t.strides[2] = row_stride;
  t.strides[1] = dims[2] * row_stride;
  t.strides[0] = dims[1] * t.strides[1];
  return t;
}

// Every head sees the whole vector of [B, N, S, vector].
Tensor same_for_heads(const Tensor& t, int64_t heads) {
  Tensor all = t;
  all.ndim = 5;
  all.dims[4] = t.dims[3];
  all.strides[4] = t.strides[3];
  all.dims[3] = heads;
  all.strides[3] = 0;
  return all;
}

}  // namespace

Tensor with_beam(const Tensor& t, int ndim) {
  if (t.ndim != ndim - 1 || t.ndim < 1) return t;
  Tensor all = t;
  all.ndim = ndim;
  for (int i = ndim - 1; i > 1; --i) all.dims[i] = t.dims[i - 1], all.strides[i] = t.strides[i - 1];
  all.dims[1] = 1;
  all.strides[1] = 0;
  return all;
}

LayerForwardArgs with_beams(const LayerDesc& desc, const LayerForwardArgs& args) {
  LayerForwardArgs all = args;
  for (Tensor* t : {&all.query, &all.key, &all.value, &all.residual, &all.out}) *t = with_beam(*t, 4);
  all.attn_weights = with_beam(args.attn_weights, desc.attention.return_weights == ReturnWeights::kPerHead ? 5 : 4);
  all.key_cache = with_beam(args.key_cache, 5);
  all.value_cache = with_beam(args.value_cache, 5);
  all.seqlens_q = with_beams(args.seqlens_q, desc.beam);
  all.seqlens_k = with_beams(args.seqlens_k, desc.beam_kv);
  all.query_offsets = with_beams(args.query_offsets, desc.beam);
  return all;
}

LayerBackwardArgs with_beams(const LayerDesc& desc, const LayerBackwardArgs& args) {
  LayerBackwardArgs all = args;
  all.forward = with_beams(desc, args.forward);
  for (Tensor* t : {&all.grad_out, &all.grad_query, &all.grad_key, &all.grad_value}) *t = with_beam(*t, 4);
  return all;
}

Tensor beam_of(const Tensor& t, int64_t n) {
  if (!t.given()) return t;
  Tensor one = t;
  one.ndim = t.ndim - 1;
  for (int i = 1; i < one.ndim; ++i) one.dims[i] = t.dims[i + 1], one.strides[i] = t.strides[i + 1];
  if (t.dims[1] > 1 && t.num_elements() > 0) {
    one.data = static_cast<char*>(t.data) + n * t.strides[1] * static_cast<int64_t>(dtype_size_bytes(t.dtype));
  }
  return one;
}

ForwardArgs sequence_args(const LayerForwardArgs& args, int64_t n) {
  ForwardArgs one;
  one.seqlens_q = beam_of(args.seqlens_q, n);
  one.seqlens_k = beam_of(args.seqlens_k, n);
  one.query_offsets = beam_of(args.query_offsets, n);
  return one;
}

DropoutStreams dropouts_of(const LayerDesc& desc, const LayerForwardArgs& args) {
  return {{{"dropout", desc.attention.dropout_p, args.dropout_seed, args.dropout_offset, desc.beam},
           {"output_dropout", desc.output_dropout_p, args.output_dropout_seed, args.output_dropout_offset}}};
}

Tensor split_heads(const Tensor& t, int64_t heads, int64_t dim) {
  Tensor apart = t;
  apart.ndim = 5;
  apart.dims[3] = heads;
  apart.dims[4] = dim;
  apart.strides[4] = t.dims[3] > 1 ? t.strides[3] : 1;  // of a dim of size 1 it may be any number
  apart.strides[3] = dim * apart.strides[4];
  return apart;
}

Call::Call(const LayerState& s, const LayerForwardArgs& a, const Activations& activations, void* memory)
    : state(s),
      args(a),
      training(a.reserve != nullptr),
      activations_(activations),
      memory_(static_cast<char*>(memory)) {}

Tensor Call::in_memory(char* memory, const Projected& at, int i) const {
  const Projection& p = state.projections[i];
  return rows_of_heads(memory + at.offset[i], state.desc.dtype, {state.desc.batch, p.beams, steps(i), p.heads, p.dim},
                       at.row_stride[i]);
}

Tensor Call::projected(int i) const {
  if (i != kQuery && cache(i).given()) return is_step(args) ? at_step(cache(i), 2, args.step) : cache(i);
  return state.projections[i].on ? in_memory(memory_, activations_.projected, i) : Tensor();
}

Tensor Call::attended(int i) const {
  const Projection& p = state.projections[i];
  if (i != kQuery && cache(i).given()) {
    Tensor all = cache(i);
    if (!p.on) all.dims[3] = p.heads, all.strides[3] = 0;
    return all;
  }
  return p.on ? in_memory(memory_, activations_.projected, i) : same_for_heads(input(i), p.heads);
}

Tensor Call::attention_out() const {
  const Projection &q = state.projections[kQuery], &v = state.projections[kValue];
  const int64_t dims[5] = {state.desc.batch, q.beams, steps(kQuery), q.heads, v.dim};
  if (training || !state.attention_writes_out()) {
    return rows_of_heads(memory_ + activations_.attention_out, state.desc.dtype, dims, state.heads_size);
  }
  return split_heads(args.out, q.heads, v.dim);
}

Tensor Call::gradient(int i) const { return in_memory(gradient_memory(), state.gradients.projected, i); }

char* Call::gradient_memory() const {
  return static_cast<char*>(state.gradients.in_workspace ? args.workspace : args.reserve);
}

ForwardArgs Call::attention(int64_t n) const {
  ForwardArgs one = sequence_args(args, n);
  one.query = beam_of(attended(kQuery), n);
  one.key = beam_of(attended(kKey), n);
  one.value = beam_of(attended(kValue), n);
  const auto of_queries = [&](const Tensor& t, int dim) { return is_step(args) ? at_step(t, dim, args.step) : t; };
  one.attn_mask = of_queries(args.attn_mask, 2);
  one.attn_bias = of_queries(args.attn_bias, 2);
  one.window_lo = of_queries(args.window_lo, 0);
  one.window_hi = of_queries(args.window_hi, 0);
  one.alibi_slopes = args.alibi_slopes;
  one.out = beam_of(attention_out(), n);
  one.weights = beam_of(args.attn_weights, n);
  one.dropout_seed = args.dropout_seed.value_or(0);
  one.dropout_offset = args.dropout_offset + static_cast<uint32_t>(n);
  if (training) {
    const LayerDesc& desc = state.desc;
    const DType sums = desc.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    const int64_t size = desc.batch * desc.num_heads * desc.seqlen_q * static_cast<int64_t>(dtype_size_bytes(sums));
    one.logsumexp =
        Tensor(memory_ + activations_.logsumexp + n * size, sums, {desc.batch, desc.num_heads, desc.seqlen_q});
  }
  return one;
}

}  // namespace polyhead
