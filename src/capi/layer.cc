// polyhead_layer.h: translates to polyhead/layer.h and back; computes nothing.
#include "capi/handles.h"
#include "core/sentence.h"

using polyhead::invalid;
using polyhead::kNumWeightKinds;
using polyhead::sentence;
using polyhead::Status;
using namespace polyhead::capi;

static_assert(sizeof(polyhead_layer_weights) == kNumWeightKinds * sizeof(polyhead_tensor));

extern "C" {

polyhead_status polyhead_layer_desc_init(polyhead_layer_desc* desc, size_t struct_size) {
  return guarded([&] { return init(desc, struct_size, "desc"); });
}

polyhead_status polyhead_layer_forward_args_init(polyhead_layer_forward_args* args, size_t struct_size) {
  return guarded([&] { return init(args, struct_size, "args"); });
}

polyhead_status polyhead_layer_backward_args_init(polyhead_layer_backward_args* args, size_t struct_size) {
  return guarded([&] { return init(args, struct_size, "args"); });
}

polyhead_status polyhead_layer_create(const polyhead_layer_desc* desc, const polyhead_plan_options* options,
                                      polyhead_layer** layer) {
  return create(desc, options, "layer", layer, polyhead::layer);
}

void polyhead_layer_destroy(polyhead_layer* layer) { delete layer; }

size_t polyhead_layer_weights_bytes(const polyhead_layer* layer) {
  return ask(layer, "layer", size_t{0}, [](const auto& l) { return l.layer.weights_bytes(); });
}

size_t polyhead_layer_prepacked_weights_bytes(const polyhead_layer* layer) {
  return ask(layer, "layer", size_t{0}, [](const auto& l) { return l.layer.prepacked_weights_bytes(); });
}

size_t polyhead_layer_workspace_bytes(const polyhead_layer* layer) {
  return ask(layer, "layer", size_t{0}, [](const auto& l) { return l.layer.workspace_bytes(); });
}

size_t polyhead_layer_backward_workspace_bytes(const polyhead_layer* layer) {
  return ask(layer, "layer", size_t{0}, [](const auto& l) { return l.layer.backward_workspace_bytes(); });
}

size_t polyhead_layer_reserve_bytes(const polyhead_layer* layer) {
  return ask(layer, "layer", size_t{0}, [](const auto& l) { return l.layer.reserve_bytes(); });
}

const char* polyhead_layer_kernel_name(const polyhead_layer* layer) {
  return ask(layer, "layer", "", [](const auto& l) { return l.layer.kernel_name(); });
}

polyhead_status polyhead_layer_weight_layout(const polyhead_layer* layer, int32_t kind,
                                             polyhead_weight_layout* layout) {
  return guarded([&]() -> Status {
    if (Status s = need(layer, "layer"); !s.ok()) return s;
    if (Status s = need(layout, "layout"); !s.ok()) return s;
    if (kind < 0 || kind >= kNumWeightKinds) {
      return invalid(sentence("kind is ", kind, ", must be a polyhead_weight_kind: 0 to ", kNumWeightKinds - 1));
    }
    const polyhead::WeightLayout told = layer->layer.weight_layout(static_cast<polyhead::WeightKind>(kind));
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
    write_fields(layer->layer.weights_in(buffer), weights);
    return {};
  });
}

polyhead_status polyhead_layer_prepack_weights(const polyhead_layer* layer, const polyhead_layer_weights* weights,
                                               void* prepacked, size_t bytes) {
  return pack(layer, "layer", weights, prepacked, bytes,
              [](const auto& l, const auto&... given) { return l.layer.prepack_weights(given...); });
}

polyhead_status polyhead_layer_forward(const polyhead_layer* layer, const polyhead_layer_forward_args* args) {
  return call(layer, "layer", args, [](const auto& l, const auto& tensors) { return l.layer.forward(tensors); });
}

polyhead_status polyhead_layer_backward_data(const polyhead_layer* layer, const polyhead_layer_backward_args* args) {
  return call(layer, "layer", args, [](const auto& l, const auto& tensors) { return l.layer.backward_data(tensors); });
}

polyhead_status polyhead_layer_backward_weights(const polyhead_layer* layer, const polyhead_layer_backward_args* args) {
  return call(layer, "layer", args,
              [](const auto& l, const auto& tensors) { return l.layer.backward_weights(tensors); });
}

}  // extern "C"
