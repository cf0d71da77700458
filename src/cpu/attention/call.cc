#include "cpu/attention/call.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "contract/program_call.h"
#include "core/dropout.h"
#include "core/philox.h"

namespace polyhead::cpu {
namespace {

// The stride of a dim of size 1 may be any number: here it becomes one that pointers can step by.
int64_t stride_of(const Tensor& t, int dim, int64_t otherwise = 0) {
  return t.dims[dim] <= 1 ? otherwise : t.strides[dim];
}

Operand operand(const Tensor& t) {
  if (t.num_elements() == 0) return {t.data, t.dtype, 0, 0, 0, 1};  // its strides may be any numbers
  if (t.ndim == 3) return {t.data, t.dtype, 0, stride_of(t, 0), stride_of(t, 1), stride_of(t, 2, 1)};
  return {t.data, t.dtype, stride_of(t, 0), stride_of(t, 1), stride_of(t, 2), stride_of(t, 3, 1)};
}

// Keys or values.
Operand stored(const Tensor& t, const Tensor& scales, int64_t group, int64_t dim) {
  Operand x = operand(t);
  if (!scales.given()) return x;
  const Operand s = operand(scales);
  x.scales = s.data;
  x.group = group > 0 ? group : std::max<int64_t>(dim, 1);
  x.scale_stride_b = s.stride_b, x.scale_stride_s = s.stride_s, x.scale_stride_h = s.stride_h;
  x.scale_stride_d = s.stride_d;
  return x;
}

Broadcast broadcast(const Tensor& t) {
  if (!t.given()) return {};
  return {t.data, t.dtype, stride_of(t, 0), stride_of(t, 1), stride_of(t, 2), stride_of(t, 3)};
}

Statistic statistic(const Tensor& t) {
  if (!t.given()) return {};
  const bool packed = t.ndim == 2;
  return {static_cast<float*>(t.data), packed ? 0 : stride_of(t, 0), stride_of(t, packed ? 0 : 1),
          stride_of(t, packed ? 1 : 2)};
}

Dropout dropout(const AttentionDesc& desc, const ForwardArgs& args) {
  const double p = desc.dropout_p;
  Dropout dropout = {dropout_threshold(p), args.dropout_offset, args.dropout_seed.value_or(0),
                     p < 1 ? static_cast<float>(1 / (1 - p)) : 0.0f};
  if (p == 0 || desc.num_heads == 0) return dropout;
  const DropoutOrigin& origin = desc.dropout_origin;
  dropout.first_head = static_cast<uint32_t>(origin.first_head);
  dropout.num_heads = static_cast<uint32_t>(desc.num_heads);
  dropout.other_heads = static_cast<uint32_t>(counted_heads(origin, desc.num_heads) - desc.num_heads);
  dropout.first_query = static_cast<uint32_t>(origin.first_query);
  dropout.first_key_group = static_cast<uint32_t>(origin.first_key / 8);
  return dropout;
}

}  // namespace

Problem problem(const AttentionDesc& desc, const ForwardArgs& args) {
  Problem p;
  p.batch = desc.batch;
  p.num_heads = desc.num_heads;
  p.group = desc.num_heads_kv > 0 ? desc.num_heads / desc.num_heads_kv : 1;
  p.head_dim = desc.head_dim;
  p.head_dim_v = desc.head_dim_v;
  p.dtype = desc.dtype;
  p.query = operand(args.query);
  p.key = stored(args.key, args.key_scales, desc.key_group, desc.head_dim);
  p.value = stored(args.value, args.value_scales, desc.value_group, desc.head_dim_v);
  if (desc.page_size > 0) {
    for (Operand* paged : {&p.key, &p.value}) {
      paged->page_table = static_cast<const int64_t*>(args.page_table.data);  // as Sequences read it
      paged->pages_per_sequence = args.page_table.dims[1];
      paged->page_size = desc.page_size;
      if (desc.page_size == 1)
        paged->stride_s = paged->stride_b;  // as far apart are rows whose pages follow each other
    }
  }
  p.out = operand(args.out);
  p.logsumexp = statistic(args.logsumexp);
  p.mask = broadcast(args.attn_mask);
  if (desc.mask_at_end) p.mask_keys = desc.attn_mask.dims[3];
  if (p.mask_keys == 0) p.mask.data = nullptr;  // none, wherever its elements would lie
  p.bias = broadcast(args.attn_bias);
  if (args.alibi_slopes.given()) {
    const Tensor& slopes = args.alibi_slopes;
    p.slopes = static_cast<const float*>(slopes.data);
    p.slopes_stride_b = slopes.ndim == 2 ? stride_of(slopes, 0) : 0;
    p.slopes_stride_h = stride_of(slopes, slopes.ndim - 1);
  }
  if (args.sink_logits.given()) {
    p.sinks = static_cast<const float*>(args.sink_logits.data);
    p.sinks_stride_h = stride_of(args.sink_logits, 0);
  }
  p.softmax = desc.normalizer == Normalizer::kSoftmax;
  if (args.attn_weights.given()) {
    const Tensor& w = args.attn_weights;
    p.attn_weights = w.data;
    if (desc.seqlen_k > 0) {  // weights of no keys may have any strides
      p.weights_stride_b = stride_of(w, 0);
      p.weights_stride_h = w.ndim == 4 ? stride_of(w, 1) : 0;
      p.weights_stride_q = stride_of(w, w.ndim - 2);
      p.weights_stride_k = stride_of(w, w.ndim - 1, 1);
    }
  }
  p.seqlen_k = desc.seqlen_k;
  p.band = band(desc, args);
  p.scale = static_cast<float>(desc.scale.value_or(desc.head_dim > 0 ? 1 / std::sqrt(double(desc.head_dim)) : 1.0));
  p.softcap = static_cast<float>(desc.softcap);
  p.dropout = dropout(desc, args);
  p.program = program_call(desc, args);
  return p;
}

BackwardProblem backward_problem(const AttentionDesc& desc, const BackwardArgs& args) {
  BackwardProblem p;
  p.forward = problem(desc, args.forward);
  p.grad_out = operand(args.grad_out);
  p.delta = statistic(args.delta);
  p.grad_logsumexp = statistic(args.grad_logsumexp);
  if (args.grad_query.given()) p.grad_query = operand(args.grad_query);
  if (args.grad_key.given()) p.grad_key = operand(args.grad_key);
  if (args.grad_value.given()) p.grad_value = operand(args.grad_value);
  p.grad_bias = broadcast(args.grad_attn_bias);
  if (args.grad_alibi_slopes.given()) {
    const Tensor& slopes = args.grad_alibi_slopes;
    p.grad_slopes = static_cast<float*>(slopes.data);
    p.grad_slopes_stride_b = slopes.ndim == 2 ? stride_of(slopes, 0) : 0;
    p.grad_slopes_stride_h = stride_of(slopes, slopes.ndim - 1);
  }
  p.accumulate = args.accumulate;
  return p;
}

void clear_rows(const Operand& x, int64_t b, int64_t h, int64_t first, int64_t end, int64_t dim) {
  if (dim == 0) return;  // x may be null
  const int64_t bytes = element_bytes(x.dtype);
  for (int64_t i = first; i < end; ++i) {
    char* row = static_cast<char*>(x.data) + (b * x.stride_b + i * x.stride_s + h * x.stride_h) * bytes;
    if (x.stride_d == 1) {
      std::memset(row, 0, static_cast<size_t>(dim * bytes));
      continue;
    }
    for (int64_t d = 0; d < dim; ++d) {
      std::memset(row + d * x.stride_d * bytes, 0, static_cast<size_t>(bytes));
    }
  }
}

void hide_rows(const Problem& p, int64_t b, int64_t h, int64_t first, int64_t end) {
  clear_rows(p.out, b, h, first, end, p.head_dim_v);
  const Statistic& l = p.logsumexp;
  for (int64_t i = first; i < end && l.data != nullptr; ++i) {
    l.data[b * l.stride_b + h * l.stride_h + i * l.stride_s] = -INFINITY;
  }
}

}  // namespace polyhead::cpu
