// What a Layer holds: the checked desc, the plans of its attention, its matrix products, and where things lie in memory.
//   B batch  N beams  Sq, Sk time steps  H heads  G key/value heads  D, Dv head dims
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "layer/module.h"
#include "polyhead/layer.h"

namespace polyhead {

// Query, key or value on its way to attention.
struct Projection {
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

struct LayerState : Module {
  LayerDesc desc;
  Projection projections[3];
  int64_t heads_size = 0;  // H * Dv: a row of the attention's output
  int64_t out_size = 0;
  bool joined = false;                     // q, k and v lie side by side
  std::optional<Plan> train, infer, step;  // on a cache infer alone
  WeightLayout weight_layouts[kNumWeightKinds];
  size_t weights_bytes = 0;

  bool out_projected() const { return desc.out_proj_size > 0; }
  // Whether key and query are more than projected on their way to a cache.
  bool turns() const { return desc.cache && (desc.cache->rotary_dim > 0 || desc.cache->hadamard); }
  // Whether a call may be one step of decoding.
  bool takes_steps() const { return !desc.cache; }
  // Whether attention may write to the caller's out at once.
  bool attention_writes_out() const { return !out_projected() && !desc.residual; }
  void emit(Pass pass, Memory& workspace, Memory& reserve, StepList* list) const override;
  Status check(Pass pass, const Call& call) const override;
};

// checks_desc.cc: everything but what plan() checks itself.
Status check_layer_desc(const LayerDesc& desc);

// weight_layout.cc
void lay_out_weights(LayerState& state, MemoryMap& map);
LayerWeights tensors_of(const LayerState& state, void* buffer);

// layer.cc: what layer() makes.
Result<std::shared_ptr<const LayerState>> make_layer_state(const LayerDesc& desc, const PlanOptions& options);

}  // namespace polyhead
