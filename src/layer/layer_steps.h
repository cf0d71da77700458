// The steps of a layer, as the layer itself and a block around it emit them.
#pragma once

#include "layer/state.h"

namespace polyhead {

enum class LayerMode { kTraining, kInference, kStep };

// Where the steps find what they read and write: what their owner decides, and then what lies on the way.
struct LayerPlaces {
  Place inputs[3];  // query, key, value
  Place residual;   // nowhere: none
  Place out, grad_out;
  Place grads[3];       // of the inputs
  bool caches = false;  // the key and value caches may be given

  Place projected[3];   // where the projections of the inputs go, or copies of them
  Place attended[3];    // what attention reads
  Place attention_out;  // [B, N, Sq, H, Dv]
  Place logsumexp;      // [N, B, H, Sq]
  Place head_grads[3];  // gradients of q, k and v: from backward_data to backward_weights
  size_t head_grads_begin = 0, head_grads_end = 0;
};

// Query, key and value and the rest as arguments, as the layer has them.
LayerPlaces layer_places(const LayerState& s);

// Memory for the results on the way: in the reserve when training, else in the workspace.
void take_activations(const LayerState& s, LayerMode mode, Memory& memory, LayerPlaces* places);
void take_head_gradients(const LayerState& s, Memory& memory, LayerPlaces* places);

void emit_forward(const LayerState& s, const LayerPlaces& places, LayerMode mode, Memory& workspace,
                  std::vector<Step>* steps);

// What both backward lists use: copies of inputs or of grad_out.
Place take_row_copies(const LayerState& s, Memory& workspace);
void emit_backward_data(const LayerState& s, const LayerPlaces& places, const Place& copies, Memory& workspace,
                        std::vector<Step>* steps);
void emit_backward_weights(const LayerState& s, const LayerPlaces& places, const Place& copies,
                           std::vector<Step>* steps);

}  // namespace polyhead
