// polyhead_layer.h: translates to polyhead/layer.h and back; computes nothing.
#include "capi/layer.h"

#include <cstddef>
#include <utility>

#include "capi/fields.h"
#include "capi/last_error.h"
#include "polyhead/polyhead.h"

using polyhead::DType;
using polyhead::invalid;
using polyhead::kNumWeightKinds;
using polyhead::Layer;
using polyhead::LayerBackwardArgs;
using polyhead::LayerDesc;
using polyhead::LayerForwardArgs;
using polyhead::LayerWeights;
using polyhead::PlanOptions;
using polyhead::Result;
using polyhead::sentence;
using polyhead::Status;
using polyhead::Tensor;
using polyhead::WeightKind;
using polyhead::WeightLayout;
using namespace polyhead::capi;

namespace {

// Sizes of the structs in the first version of the header, on 64-bit machines.
constexpr size_t kFirstLayerDescSize = 176;
constexpr size_t kFirstLayerForwardSize = 1752;
constexpr size_t kFirstLayerBackwardSize = 664;
static_assert(sizeof(void*) != 8 || offsetof(polyhead_layer_desc, attention) + 8 == kFirstLayerDescSize);
static_assert(sizeof(void*) != 8 ||
              offsetof(polyhead_layer_forward_args, workspace_bytes) + 8 == kFirstLayerForwardSize);
static_assert(sizeof(void*) != 8 || offsetof(polyhead_layer_backward_args, reserved) + 4 == kFirstLayerBackwardSize);
static_assert(sizeof(polyhead_layer_weights) == kNumWeightKinds * sizeof(polyhead_tensor));

polyhead_layer_desc default_layer_desc() {
  polyhead_layer_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.batch = desc.beam = desc.beam_kv = desc.num_heads = desc.num_heads_kv = 1;
  return desc;
}

polyhead_layer_forward_args default_layer_forward_args() {
  polyhead_layer_forward_args args = {};
  args.struct_size = sizeof args;
  args.step = -1;
  return args;
}

polyhead_layer_backward_args default_layer_backward_args() {
  polyhead_layer_backward_args args = {};
  args.struct_size = sizeof args;
  return args;
}

constexpr const char* kWeightNames[] = {"weights.tensors[0]", "weights.tensors[1]", "weights.tensors[2]",
                                        "weights.tensors[3]", "weights.tensors[4]", "weights.tensors[5]",
                                        "weights.tensors[6]", "weights.tensors[7]"};

// In the order of polyhead_weight_kind.
void list_tensors(LayerWeights& weights, Tensor* (&all)[kNumWeightKinds]) {
  Tensor* const in_order[] = {&weights.query,      &weights.key,      &weights.value,      &weights.out,
                              &weights.query_bias, &weights.key_bias, &weights.value_bias, &weights.out_bias};
  for (int kind = 0; kind < kNumWeightKinds; ++kind) all[kind] = in_order[kind];
}

polyhead_tensor translate_back(const Tensor& from) {
  polyhead_tensor to = {};
  to.data = from.data;
  to.dtype = static_cast<int32_t>(from.dtype);
  to.device = static_cast<int32_t>(from.device);
  to.ndim = from.ndim;
  for (int i = 0; i < from.ndim; ++i) to.dims[i] = from.dims[i], to.strides[i] = from.strides[i];
  return to;
}

}  // namespace

namespace polyhead::capi {

Status translate(const polyhead_layer_weights* from, LayerWeights* to) {
  if (from == nullptr) return {};
  Tensor* all[kNumWeightKinds];
  list_tensors(*to, all);
  for (int kind = 0; kind < kNumWeightKinds; ++kind) {
    if (Status s = translate(from->tensors[kind], kWeightNames[kind], all[kind]); !s.ok()) return s;
  }
  return {};
}

Status translate(const polyhead_layer_desc* from, LayerDesc* to) {
  polyhead_layer_desc c = default_layer_desc();
  if (Status s = take(from, kFirstLayerDescSize, "desc", &c); !s.ok()) return s;
  to->batch = c.batch;
  to->beam = c.beam;
  to->beam_kv = c.beam_kv;
  to->seqlen_q = c.seqlen_q;
  to->seqlen_k = c.seqlen_k;
  to->num_heads = c.num_heads;
  to->num_heads_kv = c.num_heads_kv;
  to->query_size = c.query_size;
  to->key_size = c.key_size;
  to->value_size = c.value_size;
  to->query_proj_size = c.query_proj_size;
  to->key_proj_size = c.key_proj_size;
  to->value_proj_size = c.value_proj_size;
  to->out_proj_size = c.out_proj_size;
  to->output_dropout_p = c.output_dropout_p;
  Fields fields;
  fields.boolean(c.query_bias, "query_bias", &to->query_bias);
  fields.boolean(c.key_bias, "key_bias", &to->key_bias);
  fields.boolean(c.value_bias, "value_bias", &to->value_bias);
  fields.boolean(c.out_bias, "out_bias", &to->out_bias);
  fields.boolean(c.residual, "residual", &to->residual);
  fields.boolean(c.has_windows, "has_windows", &to->has_windows);
  fields.choice(c.dtype, DType::kInt64, "dtype", "polyhead_dtype", &to->dtype);
  fields.zero(c.reserved, "reserved");
  if (!fields.status.ok() || c.attention == nullptr) return fields.status;
  return translate(c.attention, &to->attention);
}

Status translate(const polyhead_layer_forward_args* from, const char* name, LayerForwardArgs* to) {
  polyhead_layer_forward_args c = default_layer_forward_args();
  if (Status s = take(from, kFirstLayerForwardSize, name, &c); !s.ok()) return s;
  const TensorField tensors[] = {
      {c.query, "query", &to->query},
      {c.key, "key", &to->key},
      {c.value, "value", &to->value},
      {c.residual, "residual", &to->residual},
      {c.attn_mask, "attn_mask", &to->attn_mask},
      {c.attn_bias, "attn_bias", &to->attn_bias},
      {c.alibi_slopes, "alibi_slopes", &to->alibi_slopes},
      {c.seqlens_q, "seqlens_q", &to->seqlens_q},
      {c.seqlens_k, "seqlens_k", &to->seqlens_k},
      {c.query_offsets, "query_offsets", &to->query_offsets},
      {c.window_lo, "window_lo", &to->window_lo},
      {c.window_hi, "window_hi", &to->window_hi},
      {c.out, "out", &to->out},
      {c.attn_weights, "attn_weights", &to->attn_weights},
      {c.key_cache, "key_cache", &to->key_cache},
      {c.value_cache, "value_cache", &to->value_cache},
  };
  if (Status s = translate_all(tensors); !s.ok()) return s;
  to->dropout_seed = c.dropout_seed;
  to->dropout_offset = c.dropout_offset;
  to->output_dropout_seed = c.output_dropout_seed;
  to->output_dropout_offset = c.output_dropout_offset;
  to->step = c.step;
  translate_memory(c, to);
  return translate(c.weights, &to->weights);
}

}  // namespace polyhead::capi

namespace {

Status translate(const polyhead_layer_backward_args* from, LayerBackwardArgs* to) {
  polyhead_layer_backward_args c = default_layer_backward_args();
  if (Status s = take(from, kFirstLayerBackwardSize, "args", &c); !s.ok()) return s;
  if (Status s = need(c.forward, "args.forward"); !s.ok()) return s;
  if (Status s = polyhead::capi::translate(c.forward, "args.forward", &to->forward); !s.ok()) return s;
  if (Status s = translate_gradients(c, to); !s.ok()) return s;
  Fields fields("args");
  fields.boolean(c.accumulate, "accumulate", &to->accumulate);
  fields.zero(c.reserved, "reserved");
  if (!fields.status.ok()) return fields.status;
  return polyhead::capi::translate(c.grad_weights, &to->grad_weights);
}

// One of the numbers that a layer tells.
size_t bytes_of(const polyhead_layer* layer, size_t (Layer::*bytes)() const) {
  if (guarded([&] { return need(layer, "layer"); }) != POLYHEAD_OK) return 0;
  return (layer->layer.*bytes)();
}

polyhead_status run_backward(const polyhead_layer* layer, const polyhead_layer_backward_args* args,
                             Status (Layer::*backward)(const LayerBackwardArgs&) const) {
  return guarded([&]() -> Status {
    if (Status s = need(layer, "layer"); !s.ok()) return s;
    if (Status s = need(args, "args"); !s.ok()) return s;
    LayerBackwardArgs tensors;
    if (Status s = translate(args, &tensors); !s.ok()) return s;
    return (layer->layer.*backward)(tensors);
  });
}

}  // namespace

extern "C" {

polyhead_status polyhead_layer_desc_init(polyhead_layer_desc* desc, size_t struct_size) {
  return guarded([&] { return init_struct(desc, struct_size, kFirstLayerDescSize, "desc", default_layer_desc()); });
}

polyhead_status polyhead_layer_forward_args_init(polyhead_layer_forward_args* args, size_t struct_size) {
  return guarded(
      [&] { return init_struct(args, struct_size, kFirstLayerForwardSize, "args", default_layer_forward_args()); });
}

polyhead_status polyhead_layer_backward_args_init(polyhead_layer_backward_args* args, size_t struct_size) {
  return guarded(
      [&] { return init_struct(args, struct_size, kFirstLayerBackwardSize, "args", default_layer_backward_args()); });
}

polyhead_status polyhead_layer_create(const polyhead_layer_desc* desc, const polyhead_plan_options* options,
                                      polyhead_layer** layer) {
  return guarded([&]() -> Status {
    if (Status s = need(layer, "layer"); !s.ok()) return s;
    *layer = nullptr;
    if (Status s = need(desc, "desc"); !s.ok()) return s;
    LayerDesc checked;
    PlanOptions chosen;
    if (Status s = polyhead::capi::translate(desc, &checked); !s.ok()) return s;
    if (Status s = polyhead::capi::translate(options, &chosen); !s.ok()) return s;
    Result<Layer> made = polyhead::layer(checked, chosen);
    if (!made.ok()) return made.status();
    *layer = new polyhead_layer{std::move(*made)};
    return {};
  });
}

void polyhead_layer_destroy(polyhead_layer* layer) { delete layer; }

size_t polyhead_layer_weights_bytes(const polyhead_layer* layer) { return bytes_of(layer, &Layer::weights_bytes); }
size_t polyhead_layer_packed_weights_bytes(const polyhead_layer* layer) {
  return bytes_of(layer, &Layer::packed_weights_bytes);
}
size_t polyhead_layer_workspace_bytes(const polyhead_layer* layer) { return bytes_of(layer, &Layer::workspace_bytes); }
size_t polyhead_layer_backward_workspace_bytes(const polyhead_layer* layer) {
  return bytes_of(layer, &Layer::backward_workspace_bytes);
}
size_t polyhead_layer_reserve_bytes(const polyhead_layer* layer) { return bytes_of(layer, &Layer::reserve_bytes); }

const char* polyhead_layer_kernel_name(const polyhead_layer* layer) {
  if (guarded([&] { return need(layer, "layer"); }) != POLYHEAD_OK) return "";
  return layer->layer.kernel_name();
}

polyhead_status polyhead_layer_weight_layout(const polyhead_layer* layer, int32_t kind,
                                             polyhead_weight_layout* layout) {
  return guarded([&]() -> Status {
    if (Status s = need(layer, "layer"); !s.ok()) return s;
    if (Status s = need(layout, "layout"); !s.ok()) return s;
    if (kind < 0 || kind >= kNumWeightKinds) {
      return invalid(sentence("kind is ", kind, ", must be a polyhead_weight_kind: 0 to ", kNumWeightKinds - 1));
    }
    const WeightLayout told = layer->layer.weight_layout(static_cast<WeightKind>(kind));
    *layout = {told.present, told.ndim, told.offset, {told.dims[0], told.dims[1]}, {told.strides[0], told.strides[1]}};
    return {};
  });
}

polyhead_status polyhead_layer_weights_in(const polyhead_layer* layer, void* buffer, size_t bytes,
                                          polyhead_layer_weights* weights) {
  return guarded([&]() -> Status {
    if (Status s = need(layer, "layer"); !s.ok()) return s;
    if (Status s = need(weights, "weights"); !s.ok()) return s;
    const size_t needed = layer->layer.weights_bytes();
    if (needed > 0) {
      if (Status s = need(buffer, "buffer"); !s.ok()) return s;
    }
    if (bytes < needed) return invalid(sentence("bytes is ", bytes, ", needs ", needed));
    LayerWeights views = layer->layer.weights_in(buffer);
    Tensor* all[kNumWeightKinds];
    list_tensors(views, all);
    for (int kind = 0; kind < kNumWeightKinds; ++kind) weights->tensors[kind] = translate_back(*all[kind]);
    return {};
  });
}

polyhead_status polyhead_layer_pack_weights(const polyhead_layer* layer, const polyhead_layer_weights* weights,
                                            void* packed, size_t bytes) {
  return guarded([&]() -> Status {
    if (Status s = need(layer, "layer"); !s.ok()) return s;
    if (Status s = need(weights, "weights"); !s.ok()) return s;
    LayerWeights tensors;
    if (Status s = polyhead::capi::translate(weights, &tensors); !s.ok()) return s;
    return layer->layer.pack_weights(tensors, packed, bytes);
  });
}

polyhead_status polyhead_layer_forward(const polyhead_layer* layer, const polyhead_layer_forward_args* args) {
  return guarded([&]() -> Status {
    if (Status s = need(layer, "layer"); !s.ok()) return s;
    if (Status s = need(args, "args"); !s.ok()) return s;
    LayerForwardArgs tensors;
    if (Status s = polyhead::capi::translate(args, "args", &tensors); !s.ok()) return s;
    return layer->layer.forward(tensors);
  });
}

polyhead_status polyhead_layer_backward_data(const polyhead_layer* layer, const polyhead_layer_backward_args* args) {
  return run_backward(layer, args, &Layer::backward_data);
}

polyhead_status polyhead_layer_backward_weights(const polyhead_layer* layer, const polyhead_layer_backward_args* args) {
  return run_backward(layer, args, &Layer::backward_weights);
}

}  // extern "C"
