// Which field of a C++ struct each field of a C struct is, in the order of polyhead.h, polyhead_layer.h and
// polyhead_block.h. A new field is a row here; one that has none does not compile.
#pragma once

#include <cstddef>

#include "capi/fields.h"
#include "polyhead/attention.h"
#include "polyhead/block.h"
#include "polyhead/cache.h"
#include "polyhead/polyhead.h"

namespace polyhead::capi {

// A field that has one name in both.
#define SAME(field) \
  Field { #field, &C::field, &Cpp::field }
#define CAPTURES(c, num_c, tensors) \
  CapturedTensors { #c, &C::c, #num_c, &C::num_c, &Cpp::c, &Cpp::tensors }
#define WITHIN(c, cpp_struct, cpp_type, cpp_field) \
  FieldWithin { #c, &C::c, &Cpp::cpp_struct, &cpp_type::cpp_field }

// What a program's header of the first version knew of a struct, on 64-bit machines: up to its field `last`.
#define FIRST_SIZE(last, size)               \
  static constexpr size_t kFirstSize = size; \
  static_assert(sizeof(void*) != 8 || offsetof(C, last) + sizeof(C::last) == kFirstSize);

constexpr Names kWeights{"weights", "", "weights."};
constexpr Names kForward{"args.forward", "args.forward"};
constexpr Names kDropoutOrigin{"dropout_origin", "dropout_origin"};

// The arguments of a call, and the tensors that their spans of captures point to; join() puts those of the forward call
// into the backward call's.
struct OwnedForwardArgs : ForwardArgs {
  Tensor captured[Program::kMostCaptures];
};
struct OwnedBackwardArgs : BackwardArgs {
  OwnedForwardArgs owned_forward;
  Tensor grad_captured[Program::kMostCaptures];
  void join() { forward = owned_forward; }
};
struct OwnedLayerForwardArgs : LayerForwardArgs {
  Tensor captured[Program::kMostCaptures];
};
struct OwnedLayerBackwardArgs : LayerBackwardArgs {
  OwnedLayerForwardArgs owned_forward;
  Tensor grad_captured[Program::kMostCaptures];
  void join() { forward = owned_forward; }
};
struct OwnedAttentionBlockForwardArgs : AttentionBlockForwardArgs {
  OwnedLayerForwardArgs owned_layer;
  void join() { layer = owned_layer; }
};
struct OwnedAttentionBlockBackwardArgs : AttentionBlockBackwardArgs {
  OwnedAttentionBlockForwardArgs owned_forward;
  Tensor grad_captured[Program::kMostCaptures];
  void join() { owned_forward.join(), forward = owned_forward; }
};

template <>
struct Table<polyhead_dropout_origin> {
  using C = polyhead_dropout_origin;
  using Cpp = DropoutOrigin;
  static constexpr auto kFields =
      std::make_tuple(SAME(first_head), SAME(num_heads), SAME(first_query), SAME(first_key));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_attention_desc> {
  using C = polyhead_attention_desc;
  using Cpp = AttentionDesc;
  FIRST_SIZE(return_column_sums, 248)
  static constexpr auto kFields = std::make_tuple(
      SAME(batch), SAME(seqlen_q), SAME(seqlen_k), SAME(num_heads), SAME(num_heads_kv), SAME(head_dim),
      SAME(head_dim_v), SAME(dtype), SAME(packed), SAME(has_seqlens_q), SAME(has_seqlens_k),
      OptionalField{"scale", &C::scale, "has_scale", &C::has_scale, &Cpp::scale}, SAME(causal), SAME(softcap),
      SAME(window_left), SAME(window_right),
      OptionalField{"query_offset", &C::query_offset, "has_query_offset", &C::has_query_offset, &Cpp::query_offset},
      SAME(has_query_offsets), SAME(align), SAME(alibi_slopes_ndim), SAME(attn_mask), SAME(attn_bias), SAME(dropout_p),
      SAME(return_weights), SAME(return_column_sums), Struct{kDropoutOrigin, &C::dropout_origin, &Cpp::dropout_origin},
      OptionalField{"out_dtype", &C::out_dtype, "has_out_dtype", &C::has_out_dtype, &Cpp::out_dtype},
      OptionalField{"grad_dtype", &C::grad_dtype, "has_grad_dtype", &C::has_grad_dtype, &Cpp::grad_dtype},
      SAME(has_windows), SAME(has_sink_logits), ProgramFields(), SAME(page_size), SAME(num_pages), SAME(normalizer),
      Reserved{"reserved", &C::reserved},
      OptionalField{"key_dtype", &C::key_dtype, "has_key_dtype", &C::has_key_dtype, &Cpp::key_dtype},
      OptionalField{"value_dtype", &C::value_dtype, "has_value_dtype", &C::has_value_dtype, &Cpp::value_dtype},
      SAME(key_group), SAME(value_group), SAME(sink_keys), SAME(mask_at_end), Reserved{"reserved_2", &C::reserved_2});
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_kv_cache_desc> {
  using C = polyhead_kv_cache_desc;
  using Cpp = KvCacheDesc;
  FIRST_SIZE(hadamard, 80)
  static constexpr auto kFields = std::make_tuple(
      SAME(num_pages), SAME(page_size), SAME(num_heads_kv), SAME(head_dim), SAME(head_dim_v), SAME(key_dtype),
      SAME(value_dtype), SAME(rotary_dim), SAME(interleaved), SAME(hadamard), SAME(key_group), SAME(value_group));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_kv_tensors> {
  using C = polyhead_kv_tensors;
  using Cpp = KvTensors;
  static constexpr auto kFields = std::make_tuple(SAME(key), SAME(value), SAME(key_scales), SAME(value_scales));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_kv_append_args> {
  using C = polyhead_kv_append_args;
  using Cpp = KvAppendArgs;
  FIRST_SIZE(executor, 856)
  static constexpr auto kFields =
      std::make_tuple(SAME(key), SAME(value), SAME(slots), SAME(positions), SAME(cos), SAME(sin), SAME(query),
                      SAME(query_out), SAME(executor), SAME(stream));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_plan_options> {
  using C = polyhead_plan_options;
  using Cpp = PlanOptions;
  FIRST_SIZE(executor, 32)
  static constexpr auto kFields =
      std::make_tuple(SAME(kernel), WITHIN(executor, where, Where, executor), WITHIN(device, where, Where, device),
                      Reserved{"reserved", &C::reserved}, WITHIN(stream, where, Where, stream));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_forward_args> {
  using C = polyhead_forward_args;
  using Cpp = OwnedForwardArgs;
  FIRST_SIZE(workspace_bytes, 1608)
  static constexpr auto kFields =
      std::make_tuple(SAME(query), SAME(key), SAME(value), SAME(attn_mask), SAME(attn_bias), SAME(alibi_slopes),
                      SAME(seqlens_q), SAME(seqlens_k), SAME(cu_seqlens_q), SAME(cu_seqlens_k), SAME(query_offsets),
                      SAME(dropout_seed), SAME(dropout_offset), Reserved{"reserved", &C::reserved}, SAME(out),
                      SAME(logsumexp), SAME(attn_weights), SAME(column_sums), SAME(workspace), SAME(workspace_bytes),
                      WITHIN(executor, where, Where, executor), WITHIN(stream, where, Where, stream), SAME(window_lo),
                      SAME(window_hi), CAPTURES(captures, num_captures, captured), SAME(sink_logits), SAME(page_table),
                      SAME(key_scales), SAME(value_scales));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_backward_args> {
  using C = polyhead_backward_args;
  using Cpp = OwnedBackwardArgs;
  FIRST_SIZE(reserved, 864)
  static constexpr auto kFields = std::make_tuple(
      Pointer{kForward, Null::kRefused, &C::forward, &Cpp::owned_forward}, SAME(grad_out), SAME(grad_logsumexp),
      SAME(delta), SAME(grad_query), SAME(grad_key), SAME(grad_value), SAME(grad_attn_bias), SAME(grad_alibi_slopes),
      SAME(accumulate), Reserved{"reserved", &C::reserved}, CAPTURES(grad_captures, num_grad_captures, grad_captured),
      SAME(grad_sink_logits));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_layer_desc> {
  using C = polyhead_layer_desc;
  using Cpp = LayerDesc;
  FIRST_SIZE(attention, 176)
  static constexpr auto kFields = std::make_tuple(
      SAME(batch), SAME(beam), SAME(beam_kv), SAME(seqlen_q), SAME(seqlen_k), SAME(num_heads), SAME(num_heads_kv),
      SAME(query_size), SAME(key_size), SAME(value_size), SAME(query_proj_size), SAME(key_proj_size),
      SAME(value_proj_size), SAME(out_proj_size), SAME(query_bias), SAME(key_bias), SAME(value_bias), SAME(out_bias),
      SAME(output_dropout_p), SAME(residual), SAME(has_windows), SAME(dtype), Reserved{"reserved", &C::reserved},
      Pointer{Names{"desc.attention"}, Null::kAllowed, &C::attention, &Cpp::attention},
      Pointer{Names{"desc.cache", "cache"}, Null::kAllowed, &C::cache, &Cpp::cache}, SAME(seqlen_new));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_layer_weights> {
  using C = polyhead_layer_weights;
  using Cpp = LayerWeights;
  static constexpr auto kFields = std::make_tuple(
      Element{"tensors[0]", &C::tensors, 0, &Cpp::query}, Element{"tensors[1]", &C::tensors, 1, &Cpp::key},
      Element{"tensors[2]", &C::tensors, 2, &Cpp::value}, Element{"tensors[3]", &C::tensors, 3, &Cpp::out},
      Element{"tensors[4]", &C::tensors, 4, &Cpp::query_bias}, Element{"tensors[5]", &C::tensors, 5, &Cpp::key_bias},
      Element{"tensors[6]", &C::tensors, 6, &Cpp::value_bias}, Element{"tensors[7]", &C::tensors, 7, &Cpp::out_bias});
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_layer_cache_args> {
  using C = polyhead_layer_cache_args;
  using Cpp = LayerCacheArgs;
  static constexpr auto kFields = std::make_tuple(Struct{Names{"pool", "pool", "pool."}, &C::pool, &Cpp::pool},
                                                  SAME(page_table), SAME(slots), SAME(positions), SAME(cos), SAME(sin));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_layer_forward_args> {
  using C = polyhead_layer_forward_args;
  using Cpp = OwnedLayerForwardArgs;
  FIRST_SIZE(workspace_bytes, 1752)
  static constexpr auto kFields = std::make_tuple(
      SAME(query), SAME(key), SAME(value), SAME(residual),
      Pointer{kWeights, Null::kAllowed, &C::weights, &Cpp::weights}, SAME(attn_mask), SAME(attn_bias),
      SAME(alibi_slopes), SAME(seqlens_q), SAME(seqlens_k), SAME(query_offsets), SAME(window_lo), SAME(window_hi),
      SAME(dropout_seed), SAME(output_dropout_seed), SAME(dropout_offset), SAME(output_dropout_offset), SAME(out),
      SAME(attn_weights), SAME(key_cache), SAME(value_cache), SAME(step), SAME(reserve), SAME(reserve_bytes),
      SAME(workspace), SAME(workspace_bytes), SAME(prepacked_weights), SAME(prepacked_weights_bytes),
      CAPTURES(captures, num_captures, captured), SAME(sink_logits), Struct{Names{"cache"}, &C::cache, &Cpp::cache},
      WITHIN(executor, where, Where, executor), WITHIN(stream, where, Where, stream));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_layer_backward_args> {
  using C = polyhead_layer_backward_args;
  using Cpp = OwnedLayerBackwardArgs;
  FIRST_SIZE(reserved, 664)
  static constexpr auto kFields =
      std::make_tuple(Pointer{kForward, Null::kRefused, &C::forward, &Cpp::owned_forward}, SAME(grad_out),
                      SAME(grad_query), SAME(grad_key), SAME(grad_value), SAME(grad_attn_bias), SAME(grad_alibi_slopes),
                      Pointer{kWeights, Null::kAllowed, &C::grad_weights, &Cpp::grad_weights}, SAME(accumulate),
                      Reserved{"reserved", &C::reserved}, CAPTURES(grad_captures, num_grad_captures, grad_captured),
                      SAME(grad_sink_logits));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_norm_desc> {
  using C = polyhead_norm_desc;
  using Cpp = NormDesc;
  static constexpr auto kFields = std::make_tuple(SAME(kind), SAME(pre), SAME(gamma), SAME(beta), SAME(eps));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_norm_weights> {
  using C = polyhead_norm_weights;
  using Cpp = NormWeights;
  static constexpr auto kFields = std::make_tuple(SAME(gamma), SAME(beta));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_attention_block_desc> {
  using C = polyhead_attention_block_desc;
  using Cpp = AttentionBlockDesc;
  FIRST_SIZE(norm, 48)
  static constexpr auto kFields = std::make_tuple(Pointer{Names{"desc.layer"}, Null::kRefused, &C::layer, &Cpp::layer},
                                                  Struct{Names{"norm", "norm"}, &C::norm, &Cpp::norm});
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_attention_block_forward_args> {
  using C = polyhead_attention_block_forward_args;
  using Cpp = OwnedAttentionBlockForwardArgs;
  FIRST_SIZE(norm, 232)
  static constexpr auto kFields =
      std::make_tuple(Pointer{Names{"args.layer", "args.layer"}, Null::kRefused, &C::layer, &Cpp::owned_layer},
                      Struct{Names{"norm", "", "norm."}, &C::norm, &Cpp::norm});
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_attention_block_backward_args> {
  using C = polyhead_attention_block_backward_args;
  using Cpp = OwnedAttentionBlockBackwardArgs;
  FIRST_SIZE(reserved, 872)
  static constexpr auto kFields =
      std::make_tuple(Pointer{kForward, Null::kRefused, &C::forward, &Cpp::owned_forward}, SAME(grad_out),
                      SAME(grad_query), SAME(grad_key), SAME(grad_value), SAME(grad_attn_bias), SAME(grad_alibi_slopes),
                      Pointer{kWeights, Null::kAllowed, &C::grad_weights, &Cpp::grad_weights},
                      Struct{Names{"grad_norm", "", "grad_norm."}, &C::grad_norm, &Cpp::grad_norm}, SAME(accumulate),
                      Reserved{"reserved", &C::reserved}, CAPTURES(grad_captures, num_grad_captures, grad_captured),
                      SAME(grad_sink_logits));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_feed_forward_block_desc> {
  using C = polyhead_feed_forward_block_desc;
  using Cpp = FeedForwardBlockDesc;
  FIRST_SIZE(reserved, 112)
  static constexpr auto kFields = std::make_tuple(
      SAME(batch), SAME(seqlen), SAME(size), SAME(inner_size), SAME(activation), SAME(bias1), SAME(bias2),
      SAME(residual), SAME(inner_dropout_p), SAME(output_dropout_p),
      Struct{Names{"norm", "norm"}, &C::norm, &Cpp::norm}, SAME(dtype), Reserved{"reserved", &C::reserved});
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_feed_forward_weights> {
  using C = polyhead_feed_forward_weights;
  using Cpp = FeedForwardWeights;
  static constexpr auto kFields = std::make_tuple(SAME(weight1), SAME(bias1), SAME(weight2), SAME(bias2),
                                                  Struct{Names{"norm", "", "weights.norm."}, &C::norm, &Cpp::norm});
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_feed_forward_block_forward_args> {
  using C = polyhead_feed_forward_block_forward_args;
  using Cpp = FeedForwardBlockForwardArgs;
  FIRST_SIZE(prepacked_weights_bytes, 304)
  static constexpr auto kFields = std::make_tuple(
      SAME(x), Pointer{kWeights, Null::kAllowed, &C::weights, &Cpp::weights}, SAME(inner_dropout_seed),
      SAME(output_dropout_seed), SAME(inner_dropout_offset), SAME(output_dropout_offset), SAME(out), SAME(reserve),
      SAME(reserve_bytes), SAME(workspace), SAME(workspace_bytes), SAME(prepacked_weights),
      SAME(prepacked_weights_bytes), WITHIN(executor, where, Where, executor), WITHIN(stream, where, Where, stream));
  static_assert(is_whole<C>(kFields));
};

template <>
struct Table<polyhead_feed_forward_block_backward_args> {
  using C = polyhead_feed_forward_block_backward_args;
  using Cpp = FeedForwardBlockBackwardArgs;
  FIRST_SIZE(reserved, 248)
  static constexpr auto kFields =
      std::make_tuple(Pointer{kForward, Null::kRefused, &C::forward, &Cpp::forward}, SAME(grad_out), SAME(grad_x),
                      Pointer{kWeights, Null::kAllowed, &C::grad_weights, &Cpp::grad_weights}, SAME(accumulate),
                      Reserved{"reserved", &C::reserved});
  static_assert(is_whole<C>(kFields));
};

#undef SAME
#undef WITHIN
#undef FIRST_SIZE

}  // namespace polyhead::capi
