#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>

#include "attention/checks.h"
#include "contract/sequences.h"
#include "core/dropout.h"
#include "core/dtype.h"
#include "core/sentence.h"

namespace polyhead {
namespace {

struct Size {
  const char* name;
  int64_t value;
};

bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kFloat64;
}

// A dtype of results, which may be wider than that of the inputs.
Status check_stored(const char* name, std::optional<DType> stored, DType inputs) {
  const bool widens = inputs == DType::kBFloat16 || inputs == DType::kFloat16;
  if (!stored || *stored == inputs || (widens && *stored == DType::kFloat32)) return {};
  return invalid(sentence(name, " is ", dtype_name(*stored), ", must be ", dtype_name(inputs), " as dtype",
                          widens ? ", or float32" : ""));
}

// What keys or values are stored in, and how many of a row's elements share a scale.
Status check_format(const char* name, std::optional<DType> stored, DType inputs, Size group, Size dim) {
  if (stored && *stored != inputs && !has_scales(*stored)) {
    return invalid(sentence(name, " is ", dtype_name(*stored), ", must be ", dtype_name(inputs),
                            " as dtype, or int8, float8_e4m3, float8_e5m2 or int4x2"));
  }
  if (stored == DType::kInt4x2 && dim.value % 2 != 0) {
    return invalid(sentence(dim.name, " is ", dim.value, ", must be even where ", name, " is int4x2"));
  }
  if (group.value == 0) return {};
  if (!stored || !has_scales(*stored)) {
    return invalid(sentence(group.name, " is ", group.value, ", but ", dtype_name(stored.value_or(inputs)),
                            " has no scales: leave it 0"));
  }
  if (group.value > 0 && group.value % 16 == 0 && dim.value % group.value == 0) return {};
  return invalid(sentence(group.name, " is ", group.value,
                          ", must be 0 (one scale for a row), or a multiple of 16 that divides ", dim.name, " ",
                          dim.value));
}

Status check_sizes(const AttentionDesc& desc) {
  for (const Size& size : {Size{"batch", desc.batch}, Size{"seqlen_q", desc.seqlen_q}, Size{"seqlen_k", desc.seqlen_k},
                           Size{"num_heads", desc.num_heads}, Size{"num_heads_kv", desc.num_heads_kv},
                           Size{"head_dim", desc.head_dim}, Size{"head_dim_v", desc.head_dim_v}}) {
    if (size.value < 0) return invalid(sentence(size.name, " is ", size.value, ", must not be negative"));
  }
  if (desc.num_heads > 0 && (desc.num_heads_kv == 0 || desc.num_heads % desc.num_heads_kv != 0)) {
    return invalid(sentence("num_heads_kv is ", desc.num_heads_kv, ", must divide num_heads ", desc.num_heads));
  }
  if (!is_float(desc.dtype)) {
    return invalid(sentence("dtype is ", dtype_name(desc.dtype), ", takes float32, bfloat16, float16 or float64"));
  }
  Status status = check_stored("out_dtype", desc.out_dtype, desc.dtype);
  if (status.ok()) status = check_stored("grad_dtype", desc.grad_dtype, desc.dtype);
  if (status.ok()) {
    status = check_format("key_dtype", desc.key_dtype, desc.dtype, {"key_group", desc.key_group},
                          {"head_dim", desc.head_dim});
  }
  if (!status.ok()) return status;
  return check_format("value_dtype", desc.value_dtype, desc.dtype, {"value_group", desc.value_group},
                      {"head_dim_v", desc.head_dim_v});
}

// A product with its zeros left out: then every partial product fits too. Eight bytes an element at most.
Status check_product(const char* tensor, std::initializer_list<Size> sizes) {
  int64_t product = 8;
  bool fits = true;
  for (const Size& size : sizes) {
    if (size.value != 0 && __builtin_mul_overflow(product, size.value, &product)) fits = false;
  }
  if (fits) return {};
  std::string factors;
  for (const Size& size : sizes) {
    if (!factors.empty()) factors += " * ";
    factors += sentence(size.name, " ", size.value);
  }
  return invalid(sentence(tensor, " is too large: ", factors, " elements pass the address space"));
}

Status check_products(const AttentionDesc& desc) {
  // Packed rows hold the sequences of the whole batch.
  const bool paged = desc.page_size > 0;
  const Size batch{"batch", desc.batch}, operand_batch{"batch", desc.packed ? 1 : desc.batch};
  const Size keys_batch = paged ? Size{"num_pages", desc.num_pages} : operand_batch;
  const Size keys = paged ? Size{"page_size", desc.page_size} : Size{"seqlen_k", desc.seqlen_k};
  const Size seqlen_q{"seqlen_q", desc.seqlen_q}, seqlen_k{"seqlen_k", desc.seqlen_k};
  const Size num_heads{"num_heads", desc.num_heads}, num_heads_kv{"num_heads_kv", desc.num_heads_kv};
  const Size head_dim{"head_dim", desc.head_dim}, head_dim_v{"head_dim_v", desc.head_dim_v};
  Status status = check_product("query", {operand_batch, seqlen_q, num_heads, head_dim});
  if (status.ok()) status = check_product("key", {keys_batch, keys, num_heads_kv, head_dim});
  if (status.ok()) status = check_product("value", {keys_batch, keys, num_heads_kv, head_dim_v});
  if (status.ok() && paged) status = check_product("page_table", {batch, seqlen_k});
  if (status.ok()) status = check_product("out", {operand_batch, seqlen_q, num_heads, head_dim_v});
  if (status.ok()) status = check_product("column_sums", {operand_batch, num_heads, seqlen_k});
  if (status.ok()) status = check_product("the list of heads", {batch, num_heads});
  if (status.ok() && desc.return_weights != ReturnWeights::kNone) {
    status = check_product("attn_weights", {operand_batch, num_heads, seqlen_q, seqlen_k});
  }
  return status;
}

Status check_pages(const AttentionDesc& desc) {
  if (desc.page_size < 0) return invalid(sentence("page_size is ", desc.page_size, ", must be 0 (none) or more"));
  if (desc.page_size == 0) {
    if (desc.num_pages == 0) return {};
    return invalid(sentence("num_pages is ", desc.num_pages, ", but page_size is 0 (none)"));
  }
  if (desc.num_pages < 0) return invalid(sentence("num_pages is ", desc.num_pages, ", must not be negative"));
  if (!desc.has_seqlens_k) return invalid("page_table needs seqlens_k: how many keys of its pages each sequence has");
  if (desc.seqlen_k % desc.page_size == 0) return {};
  return invalid(sentence("seqlen_k is ", desc.seqlen_k, ", must be a multiple of page_size ", desc.page_size));
}

Status check_numbers(const AttentionDesc& desc) {
  if (desc.scale && !std::isfinite(*desc.scale)) {
    return invalid(sentence("scale is ", *desc.scale, ", must be a finite number"));
  }
  if (!(desc.softcap >= 0 && std::isfinite(desc.softcap))) {
    return invalid(sentence("softcap is ", desc.softcap, ", must be 0 (off) or a positive finite number"));
  }
  for (const Size& window : {Size{"window_left", desc.window_left}, Size{"window_right", desc.window_right}}) {
    if (window.value < -1) {
      return invalid(sentence(window.name, " is ", window.value, ", must be -1 (open) or at least 0"));
    }
  }
  if (desc.sink_keys < 0) return invalid(sentence("sink_keys is ", desc.sink_keys, ", must be at least 0"));
  if (!(desc.dropout_p >= 0 && desc.dropout_p <= 1)) {
    return invalid(sentence("dropout_p is ", desc.dropout_p, ", must be 0 to 1"));
  }
  if (desc.dropout_p > 0) {
    Status counters =
        check_dropout_counters(desc.dropout_origin, desc.batch, desc.num_heads, desc.seqlen_q, desc.seqlen_k);
    if (!counters.ok()) return counters;
  }
  const auto weights = static_cast<int32_t>(desc.return_weights);
  if (weights < 0 || weights > 2) {
    return invalid(sentence("return_weights is ", weights, ", must be 0 (none), 1 (per head) or 2 (mean)"));
  }
  return {};
}

Status check_normalizer(const AttentionDesc& desc) {
  const auto normalizer = static_cast<int32_t>(desc.normalizer);
  if (normalizer < 0 || normalizer > 1) {
    return invalid(sentence("normalizer is ", normalizer, ", must be 0 (softmax) or 1 (none)"));
  }
  if (desc.normalizer == Normalizer::kSoftmax || !desc.has_sink_logits) return {};
  return invalid("sink_logits are given, but normalizer is none: a sink is one more logit of the softmax");
}

Status check_alignment(const AttentionDesc& desc) {
  const auto align = static_cast<int32_t>(desc.align);
  if (align < 0 || align > 2) {
    return invalid(sentence("align is ", align, ", must be 0 (unset), 1 (top_left) or 2 (bottom_right)"));
  }
  if (desc.query_offset && desc.has_query_offsets) {
    return invalid("query_offset and query_offsets are both given, give one");
  }
  if (desc.align != Align::kUnset && (desc.query_offset || desc.has_query_offsets)) {
    return invalid(sentence("align is ", desc.align == Align::kTopLeft ? "top_left" : "bottom_right",
                            " and query_offset", desc.has_query_offsets ? "s are" : " is", " given too, give one"));
  }
  // With lengths of their own, sequences are compared in each call.
  if (has_lengths(desc) || desc.batch == 0 || desc.seqlen_q == desc.seqlen_k) return {};
  const char* option = unaligned_option(desc);
  return option == nullptr ? Status() : alignment_missing(option, -1, desc.seqlen_q, desc.seqlen_k);
}

Status check_broadcast(const char* name, const BroadcastOperand& operand, const AttentionDesc& desc) {
  if (!operand.given) return {};
  const Size full[4] = {
      {"batch", desc.batch}, {"num_heads", desc.num_heads}, {"seqlen_q", desc.seqlen_q}, {"seqlen_k", desc.seqlen_k}};
  for (int i = 0; i < 4; ++i) {
    const int64_t dim = operand.dims[i];
    if (dim == 1 || dim == full[i].value) continue;
    return invalid(sentence(name, " dim ", i, " is ", dim, ", must be 1 or ", full[i].name, " ", full[i].value));
  }
  return check_product(
      name, {{"dim", operand.dims[0]}, {"dim", operand.dims[1]}, {"dim", operand.dims[2]}, {"dim", operand.dims[3]}});
}

// With mask_at_end its last dim is the number of keys it tells of.
Status check_mask(const AttentionDesc& desc) {
  if (!desc.mask_at_end) return check_broadcast("attn_mask", desc.attn_mask, desc);
  if (!desc.attn_mask.given) return invalid("mask_at_end needs attn_mask");
  BroadcastOperand rest = desc.attn_mask;
  const int64_t keys = std::exchange(rest.dims[3], 1);
  if (keys < 0 || keys > desc.seqlen_k) {
    return invalid(sentence("attn_mask dim 3 is ", keys, ", with mask_at_end must be 0 to seqlen_k ", desc.seqlen_k));
  }
  return check_broadcast("attn_mask", rest, desc);
}

Status check_options(const AttentionDesc& desc) {
  if (desc.attn_mask.given && desc.attn_mask.dtype != DType::kBool) {
    return invalid(sentence("attn_mask is ", dtype_name(desc.attn_mask.dtype), ", expected bool"));
  }
  if (desc.attn_bias.given) {
    const DType bias = desc.attn_bias.dtype;
    if (!is_float(bias)) {
      return invalid(sentence("attn_bias is ", dtype_name(bias), ", takes float32, bfloat16, float16 or float64"));
    }
    if (bias == DType::kFloat64 && desc.dtype != DType::kFloat64) {
      return invalid(sentence("attn_bias is float64, which needs float64 inputs; dtype is ", dtype_name(desc.dtype)));
    }
  }
  if (desc.alibi_slopes_ndim < 0 || desc.alibi_slopes_ndim > 2) {
    return invalid(sentence("alibi_slopes_ndim is ", desc.alibi_slopes_ndim,
                            ", must be 0 (none), 1 [num_heads] or 2 [batch, num_heads]"));
  }
  if (desc.packed) {
    const struct {
      const char* name;
      bool given;
    } options[] = {{"attn_mask", desc.attn_mask.given},
                   {"attn_bias", desc.attn_bias.given},
                   {"return_weights", desc.return_weights != ReturnWeights::kNone},
                   {"return_column_sums", desc.return_column_sums},
                   {"window_lo", desc.has_windows},
                   {"seqlens_q", desc.has_seqlens_q},
                   {"seqlens_k", desc.has_seqlens_k && desc.page_size == 0}};
    for (const auto& option : options) {
      if (option.given) return invalid(sentence(option.name, " cannot be given with packed sequences (cu_seqlens)"));
    }
  }
  Status status = check_mask(desc);
  if (status.ok()) status = check_broadcast("attn_bias", desc.attn_bias, desc);
  return status;
}

bool holds(const CaptureShape& shape, ValueType type) {
  if (type == ValueType::kBool) return shape.dtype == DType::kBool;
  if (type == ValueType::kInt) return shape.dtype == DType::kInt32 || shape.dtype == DType::kInt64;
  return is_float(shape.dtype);
}

Status check_program(const AttentionDesc& desc) {
  const size_t wanted = desc.program != nullptr ? desc.program->captures().size() : 0;
  if (desc.captures.size() != wanted) {
    return invalid(sentence("captures describes ", desc.captures.size(), " tensors, ",
                            desc.program != nullptr ? "the program" : "no program", " captures ", wanted));
  }
  for (size_t i = 0; i < wanted; ++i) {
    const Capture& capture = desc.program->captures()[i];
    const CaptureShape& shape = desc.captures[i];
    const int ndim = std::max(capture.ndim, 1);
    if (!holds(shape, capture.type)) {
      return invalid(sentence(capture.name, " is ", dtype_name(shape.dtype), ", the program takes ",
                              capture.type == ValueType::kFloat ? "floats"
                              : capture.type == ValueType::kInt ? "int32 or int64"
                                                                : "bool"));
    }
    if (shape.ndim != ndim)
      return invalid(sentence(capture.name, " has ", shape.ndim, " dims, the program takes ", ndim));
    for (int n = 0; n < ndim; ++n) {
      const int64_t least = capture.ndim == 0 ? 1 : 0;
      if (shape.dims[n] < least || (capture.ndim == 0 && shape.dims[n] > 1)) {
        return invalid(sentence(capture.name, " dim ", n, " is ", shape.dims[n],
                                capture.ndim == 0 ? ", must be 1" : ", must not be negative"));
      }
    }
    Status status =
        check_product(capture.name.c_str(),
                      {{"dim", shape.dims[0]}, {"dim", shape.dims[1]}, {"dim", shape.dims[2]}, {"dim", shape.dims[3]}});
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace

Status check_desc(const AttentionDesc& desc) {
  Status status = check_sizes(desc);
  if (status.ok()) status = check_pages(desc);
  if (status.ok()) status = check_products(desc);
  if (status.ok()) status = check_numbers(desc);
  if (status.ok()) status = check_normalizer(desc);
  if (status.ok()) status = check_options(desc);
  if (status.ok()) status = check_alignment(desc);
  if (status.ok()) status = check_program(desc);
  return status;
}

}  // namespace polyhead
