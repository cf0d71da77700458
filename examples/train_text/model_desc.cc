#include "model_desc.h"

#include <fmt/format.h>

namespace polyhead::demo {
namespace {

NormDesc norm_desc() {
  NormDesc norm;
  norm.eps = kNormEps;
  return norm;
}

}  // namespace

Status check_model_desc(const ModelDesc& desc) {
  const struct {
    const char* name;
    int64_t value, most;
  } sizes[] = {{"batch", desc.batch, 1 << 12},         {"context", desc.context, 1 << 16},
               {"size", desc.size, 1 << 14},           {"inner_size", desc.inner_size, 1 << 16},
               {"num_heads", desc.num_heads, 1 << 10}, {"num_layers", desc.num_layers, 1 << 10}};
  for (const auto& size : sizes) {
    if (size.value >= 1 && size.value <= size.most) continue;
    return {StatusCode::kInvalidArgument, fmt::format("{} is {}, must be 1 to {}", size.name, size.value, size.most)};
  }
  if (desc.size % desc.num_heads == 0) return {};
  return {StatusCode::kInvalidArgument, fmt::format("num_heads is {}, must divide size {}", desc.num_heads, desc.size)};
}

LayerDesc layer_desc(const ModelDesc& desc, int64_t batch) {
  LayerDesc layer;
  layer.batch = batch;
  layer.seqlen_q = layer.seqlen_k = desc.context;
  layer.num_heads = layer.num_heads_kv = desc.num_heads;
  layer.query_size = layer.key_size = layer.value_size = layer.out_proj_size = desc.size;
  layer.query_proj_size = layer.key_proj_size = layer.value_proj_size = desc.head_dim();
  layer.query_bias = layer.key_bias = layer.value_bias = layer.out_bias = true;
  layer.residual = true;
  layer.attention.causal = true;
  return layer;
}

AttentionBlockDesc attention_block_desc(const ModelDesc& desc) {
  AttentionBlockDesc block;
  block.layer = layer_desc(desc, desc.batch);
  block.norm = norm_desc();
  return block;
}

FeedForwardBlockDesc feed_forward_block_desc(const ModelDesc& desc, int64_t batch, int64_t seqlen) {
  FeedForwardBlockDesc block;
  block.batch = batch;
  block.seqlen = seqlen;
  block.size = desc.size;
  block.inner_size = desc.inner_size;
  block.activation = ActivationKind::kGeluTanh;
  block.norm = norm_desc();
  return block;
}

double step_flops(const ModelDesc& desc) {
  const auto size = static_cast<double>(desc.size), inner = static_cast<double>(desc.inner_size);
  const auto context = static_cast<double>(desc.context), layers = static_cast<double>(desc.num_layers);
  const double products = layers * 2 * size * (4 * size + 2 * inner) + 2 * size * static_cast<double>(kNumBytes);
  // (context + 1) / 2 keys a query; head dims together are `size`. QK^T and PV forward, five such products backward.
  const double attention = layers * 2 * (context + 1) / 2 * 2 * size;
  return static_cast<double>(desc.num_rows()) * (3 * products + 3.5 * attention);
}

}  // namespace polyhead::demo
