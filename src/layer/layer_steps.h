// The steps of a layer, as the layer itself and a block around it emit them.
#pragma once

#include "layer/state.h"

namespace polyhead {

// Where the steps find what they read and write.
struct LayerPlaces {
  Place inputs[3];  // query, key, value
  Place residual;   // nowhere: none
  Place out, grad_out;
  Place grads[3];       // of the inputs
  bool caches = false;  // the key and value caches may be given
};

// The steps of a pass. `head_grads`: the memory of the gradients of q, k and v; kBackwardWeights finds them in the reserve,
// unless they are in the workspace: then it comes with kBackward, which emits both.
void emit_layer(const LayerState& s, Pass pass, const LayerPlaces& places, Memory& workspace, Memory& reserve,
                Memory& head_grads, std::vector<Step>* steps);

}  // namespace polyhead
