#include "capi/translate.h"

#include <cstring>

#include "capi/fields.h"

namespace polyhead::capi {
namespace {

// The layouts that every later version of the header keeps as its beginning (on 64-bit machines).
static_assert(sizeof(void*) != 8 || sizeof(polyhead_tensor) == 104);
static_assert(sizeof(void*) != 8 || sizeof(polyhead_attention_desc) >= kFirstDescSize);
static_assert(sizeof(void*) != 8 || offsetof(polyhead_attention_desc, return_column_sums) + 4 == kFirstDescSize);
static_assert(sizeof(void*) != 8 || offsetof(polyhead_plan_options, executor) + 8 == kFirstOptionsSize);
static_assert(sizeof(void*) != 8 || offsetof(polyhead_forward_args, workspace_bytes) + 8 == kFirstForwardArgsSize);
static_assert(sizeof(void*) != 8 || offsetof(polyhead_backward_args, reserved) + 4 == kFirstBackwardArgsSize);
static_assert(sizeof(polyhead_partial) == 2 * sizeof(polyhead_tensor));
static_assert(POLYHEAD_MAX_DIMS == Tensor::kMaxDims);

}  // namespace

Status need(const void* pointer, const char* what) {
  return pointer != nullptr ? Status() : invalid(sentence(what, " is a null pointer"));
}

Status check_struct_size(size_t size, size_t first_size, size_t size_now, const char* name) {
  if (size > size_now) {
    return invalid(sentence(name, ".struct_size is ", size, ", polyhead ", polyhead_version(), " takes at most ",
                            size_now, ": the program's polyhead.h is newer than the library"));
  }
  if (size < first_size || size % 8 != 0) {
    return invalid(
        sentence(name, ".struct_size is ", size, ", expected ", size_now, ": the init function of the struct sets it"));
  }
  return {};
}

polyhead_attention_desc default_desc() {
  polyhead_attention_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.batch = desc.num_heads = desc.num_heads_kv = 1;
  desc.window_left = desc.window_right = -1;
  desc.attn_mask = {0, POLYHEAD_BOOL, {1, 1, 1, 1}};
  desc.attn_bias = {0, POLYHEAD_FLOAT32, {1, 1, 1, 1}};
  return desc;
}

polyhead_plan_options default_options() {
  polyhead_plan_options options = {};
  options.struct_size = sizeof options;
  return options;
}

polyhead_forward_args default_forward_args() {
  polyhead_forward_args args = {};
  args.struct_size = sizeof args;
  return args;
}

polyhead_backward_args default_backward_args() {
  polyhead_backward_args args = {};
  args.struct_size = sizeof args;
  return args;
}

Status translate(const polyhead_attention_desc* from, AttentionDesc* to) {
  polyhead_attention_desc c = default_desc();
  if (Status s = take(from, kFirstDescSize, "desc", &c); !s.ok()) return s;
  to->batch = c.batch;
  to->seqlen_q = c.seqlen_q;
  to->seqlen_k = c.seqlen_k;
  to->num_heads = c.num_heads;
  to->num_heads_kv = c.num_heads_kv;
  to->head_dim = c.head_dim;
  to->head_dim_v = c.head_dim_v;
  to->softcap = c.softcap;
  to->window_left = c.window_left;
  to->window_right = c.window_right;
  to->alibi_slopes_ndim = c.alibi_slopes_ndim;
  to->dropout_p = c.dropout_p;
  to->dropout_origin = {c.dropout_first_head, c.dropout_num_heads, c.dropout_first_query, c.dropout_first_key};

  Fields fields;
  bool has_scale = false, has_query_offset = false;
  fields.choice(c.dtype, DType::kInt64, "dtype", "polyhead_dtype", &to->dtype);
  fields.boolean(c.packed, "packed", &to->packed);
  fields.boolean(c.has_seqlens_q, "has_seqlens_q", &to->has_seqlens_q);
  fields.boolean(c.has_seqlens_k, "has_seqlens_k", &to->has_seqlens_k);
  fields.boolean(c.has_scale, "has_scale", &has_scale);
  fields.boolean(c.causal, "causal", &to->causal);
  fields.boolean(c.has_query_offset, "has_query_offset", &has_query_offset);
  fields.boolean(c.has_query_offsets, "has_query_offsets", &to->has_query_offsets);
  fields.choice(c.align, Align::kBottomRight, "align", "polyhead_align", &to->align);
  fields.broadcast(c.attn_mask, "attn_mask", &to->attn_mask);
  fields.broadcast(c.attn_bias, "attn_bias", &to->attn_bias);
  fields.choice(c.return_weights, ReturnWeights::kMean, "return_weights", "polyhead_return_weights",
                &to->return_weights);
  fields.boolean(c.return_column_sums, "return_column_sums", &to->return_column_sums);
  if (has_scale) {
    to->scale = c.scale;
  } else {
    fields.zero(c.scale, "scale", " where has_scale is 0");
  }
  if (has_query_offset) {
    to->query_offset = c.query_offset;
  } else {
    fields.zero(c.query_offset, "query_offset", " where has_query_offset is 0");
  }
  return fields.status;
}

Status translate(const polyhead_plan_options* from, PlanOptions* to) {
  if (from == nullptr) return {};
  polyhead_plan_options c = default_options();
  if (Status s = take(from, kFirstOptionsSize, "options", &c); !s.ok()) return s;
  if (c.kernel != nullptr) to->kernel = c.kernel;
  if (c.executor != nullptr) to->where.executor = c.executor->executor.get();
  return {};
}

Status translate(const polyhead_tensor& from, const char* name, Tensor* to) {
  if (from.ndim == 0) return {};  // not given: the other fields say nothing
  if (from.ndim < 0 || from.ndim > POLYHEAD_MAX_DIMS) {
    return invalid(sentence(name, ".ndim is ", from.ndim, ", takes 0 to ", POLYHEAD_MAX_DIMS));
  }
  Fields fields(name);
  fields.choice(from.dtype, DType::kInt64, "dtype", "polyhead_dtype", &to->dtype);
  fields.choice(from.device, Device::kCuda, "device", "polyhead_device", &to->device);
  fields.zero(from.reserved, "reserved");
  to->data = from.data;
  to->ndim = from.ndim;
  std::memcpy(to->dims, from.dims, sizeof to->dims);
  std::memcpy(to->strides, from.strides, sizeof to->strides);
  return fields.status;
}

Status translate(const polyhead_forward_args* from, const char* name, ForwardArgs* to) {
  polyhead_forward_args c = default_forward_args();
  if (Status s = take(from, kFirstForwardArgsSize, name, &c); !s.ok()) return s;
  const TensorField tensors[] = {
      {c.query, "query", &to->query},
      {c.key, "key", &to->key},
      {c.value, "value", &to->value},
      {c.attn_mask, "attn_mask", &to->attn_mask},
      {c.attn_bias, "attn_bias", &to->attn_bias},
      {c.alibi_slopes, "alibi_slopes", &to->alibi_slopes},
      {c.seqlens_q, "seqlens_q", &to->seqlens_q},
      {c.seqlens_k, "seqlens_k", &to->seqlens_k},
      {c.cu_seqlens_q, "cu_seqlens_q", &to->cu_seqlens_q},
      {c.cu_seqlens_k, "cu_seqlens_k", &to->cu_seqlens_k},
      {c.query_offsets, "query_offsets", &to->query_offsets},
      {c.out, "out", &to->out},
      {c.logsumexp, "logsumexp", &to->logsumexp},
      {c.weights, "weights", &to->weights},
      {c.column_sums, "column_sums", &to->column_sums},
  };
  if (Status s = translate_all(tensors); !s.ok()) return s;
  Fields fields(name);
  fields.zero(c.reserved, "reserved");
  to->dropout_seed = c.dropout_seed;
  to->dropout_offset = c.dropout_offset;
  to->workspace = c.workspace;
  to->workspace_bytes = c.workspace_bytes;
  return fields.status;
}

Status translate(const polyhead_backward_args* from, BackwardArgs* to) {
  polyhead_backward_args c = default_backward_args();
  if (Status s = take(from, kFirstBackwardArgsSize, "args", &c); !s.ok()) return s;
  if (Status s = need(c.forward, "args.forward"); !s.ok()) return s;
  if (Status s = translate(c.forward, "args.forward", &to->forward); !s.ok()) return s;
  const TensorField statistics[] = {
      {c.grad_logsumexp, "grad_logsumexp", &to->grad_logsumexp},
      {c.delta, "delta", &to->delta},
  };
  if (Status s = translate_all(statistics); !s.ok()) return s;
  if (Status s = translate_gradients(c, to); !s.ok()) return s;
  Fields fields("args");
  fields.boolean(c.accumulate, "accumulate", &to->accumulate);
  fields.zero(c.reserved, "reserved");
  return fields.status;
}

Status translate(const polyhead_partial* from, const char* name, Partial* to) {
  if (Status s = need(from, name); !s.ok()) return s;
  if (Status s = translate(from->out, sentence(name, ".out").c_str(), &to->out); !s.ok()) return s;
  return translate(from->logsumexp, sentence(name, ".logsumexp").c_str(), &to->logsumexp);
}

Status translate(const polyhead_partial* from, size_t count, const char* name, std::vector<Partial>* to) {
  if (Status s = need(from, name); !s.ok()) return s;
  constexpr size_t kMaxParts = 65536;  // a negative number of an int is not taken for a long array
  if (count < 1 || count > kMaxParts) return invalid(sentence("num_parts is ", count, ", takes 1 to ", kMaxParts));
  to->resize(count);
  for (size_t i = 0; i < count; ++i) {
    if (Status s = translate(from + i, sentence(name, "[", i, "]").c_str(), &(*to)[i]); !s.ok()) return s;
  }
  return {};
}

}  // namespace polyhead::capi
