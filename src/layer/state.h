// What a Layer holds: the checked desc, the plans of its attention, its matrix products, and where things lie in memory.
//   B batch  N beams  Sq, Sk time steps  H heads  G key/value heads  D, Dv head dims
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>

#include "contract/linear.h"
#include "layer/steps.h"
#include "polyhead/layer.h"

namespace polyhead {

// Query, key or value on its way to attention.
struct Projection {
  const char* name = "";
  int64_t size = 0;   // of a vector of the input
  int64_t beams = 0;  // of the input
  int64_t steps = 0;  // time steps of the input
  int64_t heads = 0;  // H, or G
  int64_t dim = 0;    // of a head
  bool on = false;
  bool bias = false;

  int64_t columns() const { return heads * dim; }
};
inline constexpr int kQuery = 0, kKey = 1, kValue = 2;  // indices of projections

struct LayerState {
  LayerDesc desc;
  Projection projections[3];
  int64_t heads_size = 0;  // H * Dv: a row of the attention's output
  int64_t out_size = 0;
  bool joined = false;  // q, k and v lie side by side

  AttentionDesc asked;  // desc.attention with its sizes
  std::optional<Plan> train, infer, step;
  const linear::Kernel* linear = nullptr;
  Run run;
  uint64_t fingerprint = 0;

  WeightLayout weights[kNumWeightKinds];
  size_t weights_bytes = 0;
  PackedLayout packed;  // of query, key, value, out

  size_t reserve_bytes = 0;
  StepList train_steps, infer_steps, decode_steps, backward_data, backward_weights;
  StepList pack;  // no steps: what pack_weights() is given

  bool out_projected() const { return desc.out_proj_size > 0; }
  // Whether attention may write to the caller's out at once.
  bool attention_writes_out() const { return !out_projected() && !desc.residual; }
  Machine machine() const { return {linear, run, &packed}; }
};

// checks_desc.cc: everything but what plan() checks itself.
Status check_layer_desc(const LayerDesc& desc);

// weight_layout.cc
void lay_out_weights(LayerState& state, MemoryMap& map);
LayerWeights tensors_of(const LayerState& state, void* buffer);

// layer.cc: what layer() makes.
Result<std::shared_ptr<const LayerState>> make_layer_state(const LayerDesc& desc, const PlanOptions& options);

}  // namespace polyhead
