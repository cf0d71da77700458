// The structs of polyhead_layer.h as those of polyhead/layer.h: what layer.cc and block.cc share.
#pragma once

#include "capi/translate.h"
#include "polyhead/layer.h"

// The handle behind a layer, and a block's own.
struct polyhead_layer {
  polyhead::Layer layer;
};

namespace polyhead::capi {

// `from` must not be null, except for weights, where null means that none are given.
Status translate(const polyhead_layer_desc* from, LayerDesc* to);
Status translate(const polyhead_layer_weights* from, LayerWeights* to);
Status translate(const polyhead_layer_forward_args* from, const char* name, LayerForwardArgs* to);

}  // namespace polyhead::capi
