// A number that tells descs apart: which layer or block has filled a reserve, which one weights were prepacked for.
#pragma once

#include <cstdint>
#include <string_view>

#include "contract/attention_operands.h"
#include "core/fingerprint.h"
#include "polyhead/block.h"

namespace polyhead {

// Over the fields of a desc. A desc is taken apart by name, so that a new field does not compile before it has been named
// here.
class DescFingerprint : public Fingerprint {
 public:
  using Fingerprint::add_field;

  template <class... Fields>
  void add(const Fields&... fields) {
    (add_field(fields), ...);
  }

  void add_field(const DropoutOrigin& origin) {
    const auto& [first_head, num_heads, first_query, first_key] = origin;
    add(first_head, num_heads, first_query, first_key);
  }
  void add_field(const NormDesc& desc) {
    const auto& [kind, pre, eps, gamma, beta] = desc;
    add(kind, pre, eps, gamma, beta);
  }
  void add_field(const PlannedOperand& operand) {
    const OperandShape& shape = operand.shape;
    add(std::string_view(operand.row.name), shape.dtype, shape.takes, shape.ndim);
    for (int i = 0; i < shape.ndim; ++i) add(shape.dims[i].size);
  }
  // A layer's options, but for those that its operands tell: it sets the sizes and the dtype itself, and refuses packed
  // sequences, pages, column sums and masks at the end.
  void add_field(const AttentionDesc& desc) {
    const auto& [batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, head_dim, head_dim_v, dtype, out_dtype, grad_dtype,
                 key_dtype, value_dtype, key_group, value_group, packed, has_seqlens_q, has_seqlens_k, page_size,
                 num_pages, scale, softcap, causal, window_left, window_right, align, query_offset, has_query_offsets,
                 has_windows, sink_keys, attn_mask, mask_at_end, attn_bias, alibi_slopes_ndim, has_sink_logits,
                 normalizer, dropout_p, dropout_origin, return_weights, return_column_sums, program, captures] = desc;
    add(scale, softcap, causal, window_left, window_right, sink_keys, align, query_offset, normalizer, dropout_p,
        dropout_origin);
    if (program != nullptr) add(std::string_view(program->text()));
    for (const CaptureShape& shape : captures)
      add(shape.dtype, shape.ndim, shape.dims[0], shape.dims[1], shape.dims[2], shape.dims[3]);
  }
  // One on a cache has no reserve.
  void add_field(const LayerDesc& desc) {
    const auto& [batch, beam, beam_kv, seqlen_q, seqlen_k, num_heads, num_heads_kv, query_size, key_size, value_size,
                 query_proj_size, key_proj_size, value_proj_size, out_proj_size, query_bias, key_bias, value_bias,
                 out_bias, residual, output_dropout_p, has_windows, dtype, cache, seqlen_new, attention] = desc;
    add(batch, beam, beam_kv, seqlen_q, seqlen_k, num_heads, num_heads_kv, query_size, key_size, value_size,
        query_proj_size, key_proj_size, value_proj_size, out_proj_size, query_bias, key_bias, value_bias, out_bias,
        residual, output_dropout_p, has_windows, dtype, attention);
  }
  void add_field(const AttentionBlockDesc& desc) {
    const auto& [layer, norm] = desc;
    add(layer, norm);
  }
  void add_field(const FeedForwardBlockDesc& desc) {
    const auto& [batch, seqlen, size, inner_size, activation, bias1, bias2, inner_dropout_p, output_dropout_p, residual,
                 norm, dtype] = desc;
    add(batch, seqlen, size, inner_size, activation, bias1, bias2, inner_dropout_p, output_dropout_p, residual, norm,
        dtype);
  }
};

template <class Desc>
uint64_t fingerprint_of(const Desc& desc) {
  DescFingerprint print;
  print.add(desc);
  return print.value();
}

// Of what has attention in it, which `attention` asks for: with all its operands.
template <class Desc>
uint64_t fingerprint_of(const Desc& desc, const AttentionDesc& attention) {
  DescFingerprint print;
  print.add(desc);
  for (const PlannedOperand& operand : planned_operands(attention)) print.add(operand);
  return print.value();
}

}  // namespace polyhead
