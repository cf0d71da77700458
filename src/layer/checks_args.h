// What the tensors of a layer's call must satisfy. Nothing is written; an error names the argument, what was expected
// and what came. `args` are those of with_beams().
#pragma once

#include "layer/state.h"

namespace polyhead {

// Whether two tensors are the same elements in the same places.
bool same_view(const Tensor& a, const Tensor& b);

Status check_forward(const LayerState& state, const LayerForwardArgs& args);
Status check_pack_weights(const LayerState& state, const LayerWeights& weights, const void* packed, size_t bytes);
// Only what backward_data reads and writes, or backward_weights.
Status check_backward_data(const LayerState& state, const LayerBackwardArgs& args);
// `stage`: what must have been done with the reserve (ReserveHeader).
Status check_backward_weights(const LayerState& state, const LayerBackwardArgs& args, uint64_t stage);

}  // namespace polyhead
