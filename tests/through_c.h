// The C interface in the classes of C++ that it stands for, so that a test asks both the same. Structs of C are written
// from those of C++ by the tables of src/capi; what C says with a pointer or a boolean beside it is written here.
#pragma once

#include "capi/tables.h"

namespace polyhead::testing {

template <class C, class Cpp = typename capi::Table<C>::Cpp>
C c_struct(const Cpp& cpp) {
  C c = {};
  capi::write_fields(cpp, &c);
  if constexpr (requires { c.struct_size; }) c.struct_size = sizeof c;
  return c;
}

inline Status result(polyhead_status status) {
  if (status == POLYHEAD_OK) return {};
  return {static_cast<StatusCode>(status), polyhead_last_error()};
}

inline polyhead_attention_desc c_desc(const AttentionDesc& d) {
  auto c = c_struct<polyhead_attention_desc>(d);
  c.has_query_offset = d.query_offset.has_value(), c.query_offset = d.query_offset.value_or(0);
  return c;
}

// Of a kernel whose name ends with a zero.
inline polyhead_plan_options c_options(const PlanOptions& options) {
  auto c = c_struct<polyhead_plan_options>(options);
  c.kernel = options.kernel.data();
  c.device = static_cast<int32_t>(options.where.device.value_or(Device::kCpu));
  return c;
}

struct PlanThroughC {
  polyhead_attention_plan* plan = nullptr;
  Status made;

  explicit PlanThroughC(const AttentionDesc& d, const char* kernel = nullptr) {
    const polyhead_attention_desc c = c_desc(d);
    auto options = c_struct<polyhead_plan_options>({});
    options.kernel = kernel;
    made = result(polyhead_attention_plan_create(&c, &options, &plan));
  }
  ~PlanThroughC() { polyhead_attention_plan_destroy(plan); }

  static polyhead_forward_args c_args(const ForwardArgs& args) {
    auto c = c_struct<polyhead_forward_args>(args);
    c.dropout_seed = args.dropout_seed.value_or(0);
    return c;
  }
  Status forward(const ForwardArgs& args) const {
    const polyhead_forward_args c = c_args(args);
    return result(polyhead_attention_forward(plan, &c));
  }
  Status backward(const BackwardArgs& args) const {
    const polyhead_forward_args forward = c_args(args.forward);
    auto c = c_struct<polyhead_backward_args>(args);
    c.forward = &forward;
    return result(polyhead_attention_backward(plan, &c));
  }
  size_t workspace_bytes() const { return polyhead_attention_plan_workspace_bytes(plan); }
  size_t backward_workspace_bytes() const { return polyhead_attention_plan_backward_workspace_bytes(plan); }
};

struct CLayerDesc {
  polyhead_attention_desc attention;
  polyhead_kv_cache_desc cache;
  polyhead_layer_desc c;

  explicit CLayerDesc(const LayerDesc& d)
      : attention(c_desc(d.attention)),
        cache(c_struct<polyhead_kv_cache_desc>(d.cache.value_or(KvCacheDesc()))),
        c(c_struct<polyhead_layer_desc>(d)) {
    c.attention = &attention;
    if (d.cache) c.cache = &cache;
  }
};

struct CLayerArgs {
  polyhead_layer_weights weights;
  polyhead_layer_forward_args c;

  explicit CLayerArgs(const LayerForwardArgs& args)
      : weights(c_struct<polyhead_layer_weights>(args.weights)), c(c_struct<polyhead_layer_forward_args>(args)) {
    c.weights = &weights;
    c.dropout_seed = args.dropout_seed.value_or(0), c.output_dropout_seed = args.output_dropout_seed.value_or(0);
  }
};

struct LayerThroughC {
  polyhead_layer* layer = nullptr;
  Status made;

  explicit LayerThroughC(const LayerDesc& d, const PlanOptions& options = {}) {
    const CLayerDesc desc(d);
    const auto c = c_options(options);
    made = result(polyhead_layer_create(&desc.c, &c, &layer));
  }
  ~LayerThroughC() { polyhead_layer_destroy(layer); }

  Status forward(const LayerForwardArgs& args) const {
    const CLayerArgs all(args);
    return result(polyhead_layer_forward(layer, &all.c));
  }
  template <class Run>
  Status backward(const LayerBackwardArgs& args, Run run) const {
    const CLayerArgs forward(args.forward);
    const auto weights = c_struct<polyhead_layer_weights>(args.grad_weights);
    auto c = c_struct<polyhead_layer_backward_args>(args);
    c.forward = &forward.c, c.grad_weights = &weights;
    return result(run(layer, &c));
  }
  Status backward_data(const LayerBackwardArgs& args) const { return backward(args, polyhead_layer_backward_data); }
  Status backward_weights(const LayerBackwardArgs& args) const {
    return backward(args, polyhead_layer_backward_weights);
  }
  Status prepack_weights(const LayerWeights& weights, void* packed, size_t bytes) const {
    const auto c = c_struct<polyhead_layer_weights>(weights);
    return result(polyhead_layer_prepack_weights(layer, &c, packed, bytes));
  }
  size_t prepacked_weights_bytes() const { return polyhead_layer_prepacked_weights_bytes(layer); }
  size_t workspace_bytes() const { return polyhead_layer_workspace_bytes(layer); }
  size_t backward_workspace_bytes() const { return polyhead_layer_backward_workspace_bytes(layer); }
  size_t reserve_bytes() const { return polyhead_layer_reserve_bytes(layer); }
};

struct AttentionBlockThroughC {
  polyhead_attention_block* block = nullptr;
  Status made;

  explicit AttentionBlockThroughC(const AttentionBlockDesc& d) {
    const CLayerDesc layer(d.layer);
    auto c = c_struct<polyhead_attention_block_desc>(d);
    c.layer = &layer.c;
    made = result(polyhead_attention_block_create(&c, nullptr, &block));
  }
  ~AttentionBlockThroughC() { polyhead_attention_block_destroy(block); }

  Status forward(const AttentionBlockForwardArgs& args) const {
    const CLayerArgs layer(args.layer);
    auto c = c_struct<polyhead_attention_block_forward_args>(args);
    c.layer = &layer.c;
    return result(polyhead_attention_block_forward(block, &c));
  }
  Status backward(const AttentionBlockBackwardArgs& args) const {
    const CLayerArgs layer(args.forward.layer);
    auto forward = c_struct<polyhead_attention_block_forward_args>(args.forward);
    forward.layer = &layer.c;
    const auto weights = c_struct<polyhead_layer_weights>(args.grad_weights);
    auto c = c_struct<polyhead_attention_block_backward_args>(args);
    c.forward = &forward, c.grad_weights = &weights;
    return result(polyhead_attention_block_backward(block, &c));
  }
  size_t workspace_bytes() const { return polyhead_attention_block_workspace_bytes(block); }
  size_t backward_workspace_bytes() const { return polyhead_attention_block_backward_workspace_bytes(block); }
  size_t reserve_bytes() const { return polyhead_attention_block_reserve_bytes(block); }
};

struct FeedForwardBlockThroughC {
  polyhead_feed_forward_block* block = nullptr;
  Status made;

  explicit FeedForwardBlockThroughC(const FeedForwardBlockDesc& d) {
    const auto c = c_struct<polyhead_feed_forward_block_desc>(d);
    made = result(polyhead_feed_forward_block_create(&c, nullptr, &block));
  }
  ~FeedForwardBlockThroughC() { polyhead_feed_forward_block_destroy(block); }

  // run(args) with weights and seeds in them.
  template <class Run>
  Status with(const FeedForwardBlockForwardArgs& args, Run run) const {
    const auto weights = c_struct<polyhead_feed_forward_weights>(args.weights);
    auto c = c_struct<polyhead_feed_forward_block_forward_args>(args);
    c.weights = &weights;
    c.inner_dropout_seed = args.inner_dropout_seed.value_or(0);
    c.output_dropout_seed = args.output_dropout_seed.value_or(0);
    return result(run(c));
  }
  Status forward(const FeedForwardBlockForwardArgs& args) const {
    return with(args, [&](const auto& c) { return polyhead_feed_forward_block_forward(block, &c); });
  }
  Status backward(const FeedForwardBlockBackwardArgs& args) const {
    const auto weights = c_struct<polyhead_feed_forward_weights>(args.grad_weights);
    auto c = c_struct<polyhead_feed_forward_block_backward_args>(args);
    c.grad_weights = &weights;
    return with(args.forward, [&](const auto& forward) {
      c.forward = &forward;
      return polyhead_feed_forward_block_backward(block, &c);
    });
  }
  size_t workspace_bytes() const { return polyhead_feed_forward_block_workspace_bytes(block); }
  size_t backward_workspace_bytes() const { return polyhead_feed_forward_block_backward_workspace_bytes(block); }
  size_t reserve_bytes() const { return polyhead_feed_forward_block_reserve_bytes(block); }
};

}  // namespace polyhead::testing
