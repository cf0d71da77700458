#include "core/sentence.h"
#include "layer/call_checks.h"
#include "layer/state.h"

namespace polyhead {
namespace {

Status check_sizes(const LayerDesc& desc) {
  Status status = check_not_negative({{"batch", desc.batch},
                                      {"beam", desc.beam},
                                      {"beam_kv", desc.beam_kv},
                                      {"seqlen_q", desc.seqlen_q},
                                      {"seqlen_k", desc.seqlen_k},
                                      {"num_heads", desc.num_heads},
                                      {"num_heads_kv", desc.num_heads_kv},
                                      {"query_size", desc.query_size},
                                      {"key_size", desc.key_size},
                                      {"value_size", desc.value_size},
                                      {"query_proj_size", desc.query_proj_size},
                                      {"key_proj_size", desc.key_proj_size},
                                      {"value_proj_size", desc.value_proj_size},
                                      {"out_proj_size", desc.out_proj_size}});
  if (!status.ok()) return status;
  if (desc.beam < 1) return invalid(sentence("beam is ", desc.beam, ", must be at least 1"));
  if (desc.beam_kv != 1 && desc.beam_kv != desc.beam) {
    return invalid(sentence("beam_kv is ", desc.beam_kv, ", must be 1 (shared by all beams) or beam ", desc.beam));
  }
  return {};
}

// How long the heads of q and k are, and whether they agree.
Status check_projections(const LayerDesc& desc) {
  const bool query_on = desc.query_proj_size > 0, key_on = desc.key_proj_size > 0;
  const int64_t query_dim = query_on ? desc.query_proj_size : desc.query_size;
  const int64_t key_dim = key_on ? desc.key_proj_size : desc.key_size;
  if (query_dim != key_dim) {
    return invalid(sentence("heads of query and key must be as long: ", query_on ? "query_proj_size" : "query_size",
                            " is ", query_dim, ", ", key_on ? "key_proj_size" : "key_size", " is ", key_dim));
  }
  const struct {
    const char* bias;
    bool given;
    const char* projection;
    int64_t size;
  } biases[] = {{"query_bias", desc.query_bias, "query_proj_size", desc.query_proj_size},
                {"key_bias", desc.key_bias, "key_proj_size", desc.key_proj_size},
                {"value_bias", desc.value_bias, "value_proj_size", desc.value_proj_size},
                {"out_bias", desc.out_bias, "out_proj_size", desc.out_proj_size}};
  for (const auto& b : biases) {
    if (!b.given || b.size > 0) continue;
    return invalid(sentence(b.bias, " is asked for, but ", b.projection, " is 0: there is no such projection"));
  }
  return {};
}

// What the layer sets itself must be as it was.
Status check_attention_options(const AttentionDesc& attention) {
  const AttentionDesc untouched;
  const struct {
    const char* name;
    int64_t value, expected;
  } sizes[] = {{"batch", attention.batch, untouched.batch},
               {"seqlen_q", attention.seqlen_q, untouched.seqlen_q},
               {"seqlen_k", attention.seqlen_k, untouched.seqlen_k},
               {"num_heads", attention.num_heads, untouched.num_heads},
               {"num_heads_kv", attention.num_heads_kv, untouched.num_heads_kv},
               {"head_dim", attention.head_dim, untouched.head_dim},
               {"head_dim_v", attention.head_dim_v, untouched.head_dim_v}};
  for (const auto& size : sizes) {
    if (size.value == size.expected) continue;
    return invalid(sentence("attention.", size.name, " is ", size.value, ", must be left at ", size.expected,
                            ": the layer sets it"));
  }
  if (attention.dtype != untouched.dtype) {
    return invalid(sentence("attention.dtype is ", dtype_name(attention.dtype),
                            ", must be left at float32: the layer's dtype counts"));
  }
  if (attention.out_dtype || attention.grad_dtype) {
    return invalid(sentence("attention.", attention.out_dtype ? "out_dtype" : "grad_dtype",
                            " is given, a layer's results have its dtype"));
  }
  if (attention.key_dtype || attention.value_dtype || attention.key_group != 0 || attention.value_group != 0) {
    return invalid(
        "attention.key_dtype or value_dtype is given: a layer's keys and values have its dtype, or its cache's");
  }
  if (attention.packed) return invalid("attention.packed is true, a layer takes no packed sequences");
  if (attention.mask_at_end) return invalid("attention.mask_at_end is true, a layer's mask tells of all keys");
  if (attention.page_size != 0 || attention.num_pages != 0) {
    return invalid("attention.page_size or num_pages is given: the layer's cache tells of pages");
  }
  if (attention.has_windows) {
    return invalid("attention.has_windows is true, must be left false: the layer's has_windows counts");
  }
  if (attention.return_column_sums) return invalid("attention.return_column_sums is true, a layer returns none");
  return {};
}

Status check_cache(const LayerDesc& desc) {
  if (desc.seqlen_new < 0) return invalid(sentence("seqlen_new is ", desc.seqlen_new, ", must not be negative"));
  if (!desc.cache && desc.seqlen_new > 0) {
    return invalid(sentence("seqlen_new is ", desc.seqlen_new, ", but there is no cache"));
  }
  if (!desc.cache) return {};
  const KvCacheDesc& cache = *desc.cache;
  const auto dim = [](int64_t projected, int64_t size) { return projected > 0 ? projected : size; };
  const struct {
    const char* name;
    int64_t value, expected;
    const char* of_what;
  } sizes[] = {
      {"num_heads_kv", cache.num_heads_kv, desc.num_heads_kv, "that of the layer"},
      {"head_dim", cache.head_dim, dim(desc.key_proj_size, desc.key_size), "the length of a head of k"},
      {"head_dim_v", cache.head_dim_v, dim(desc.value_proj_size, desc.value_size), "the length of a head of v"}};
  for (const auto& size : sizes) {
    if (size.value == size.expected) continue;
    return invalid(sentence("cache.", size.name, " is ", size.value, ", must be ", size.expected, ": ", size.of_what));
  }
  if (desc.dtype == DType::kFloat64) return invalid("dtype is float64, with a cache: float32, bfloat16 or float16");
  if (desc.beam != 1) {
    return invalid(sentence("beam is ", desc.beam, ", must be 1 with a cache: beams are sequences of the batch, whose ",
                            "tables may share pages"));
  }
  if (cache.rotary_dim > 0 && desc.seqlen_new > 0) {
    return invalid(sentence("cache.rotary_dim is ", cache.rotary_dim, ", but seqlen_new ", desc.seqlen_new,
                            " is of another sequence: one that turns by query's positions has seqlen_new 0"));
  }
  return kv_cache(cache).status();
}

}  // namespace

Status check_layer_desc(const LayerDesc& desc) {
  Status status = check_sizes(desc);
  if (status.ok()) status = check_projections(desc);
  if (status.ok()) status = check_attention_options(desc.attention);
  if (status.ok()) status = check_cache(desc);
  return status.ok() ? check_probability("output_dropout_p", desc.output_dropout_p) : status;
}

}  // namespace polyhead
