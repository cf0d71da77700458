// What a Layer holds: the checked desc, the plans of its attention, its matrix products, and where things lie in memory.
//   B batch  N beams  Sq, Sk time steps  H heads  G key/value heads  D, Dv head dims
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>

#include "contract/linear.h"
#include "layer/reserve.h"
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

// Hands out parts of a block of memory, each aligned to 64 bytes.
class MemoryMap {
 public:
  // The offset of an array of that many elements.
  size_t take(std::initializer_list<int64_t> sizes, size_t element_bytes);
  size_t take_bytes(size_t bytes) { return take({1}, bytes); }

  size_t bytes() const { return bytes_; }
  bool fits() const { return fits_; }  // in the address space

 private:
  size_t bytes_ = 0;
  bool fits_ = true;
};

// Where packed matrices lie, in bytes from the start; see packed.h.
struct PackedLayout {
  static constexpr int kMaxMatrices = 4;
  size_t begin[kMaxMatrices] = {}, end[kMaxMatrices] = {};  // end 0: no neighbour may follow
  size_t bytes = 0;
  uint64_t fingerprint = 0;
};

// Where q, k and v, or their gradients, lie: [B, N, S, columns] with rows of `row_stride` elements, so that products of
// one input write side by side.
struct Projected {
  size_t offset[3] = {};
  int64_t row_stride[3] = {};
};

// Results on the way: in the reserve when training, else in the workspace.
struct Activations {
  size_t header = 0;
  Projected projected;       // of the projections that are on
  size_t attention_out = 0;  // [B, N, Sq, H, Dv]
  size_t logsumexp = 0;      // [N, B, H, Sq]
  size_t bytes = 0;
};

// Gradients of q, k and v: what backward_data hands on to backward_weights, which may be a call of its own.
struct HeadGradients {
  bool in_workspace = false;  // where both are one call, a block's; else in the reserve
  Projected projected;
  size_t begin = 0, end = 0;
};

struct ForwardScratch {
  Activations activations;  // when not training
  size_t step_lengths = 0;  // int64 [B], and offsets behind
  size_t shared = 0;        // for one kernel after the other
  size_t bytes = 0;
};

struct BackwardScratch {
  size_t rows = 0;            // a copy of one input, or of grad_out: without padding, or after dropout
  size_t grad_attention = 0;  // [B, N, Sq, H, Dv]
  size_t shared = 0;
  size_t bytes = 0;
};

struct LayerState {
  LayerDesc desc;
  Projection projections[3];
  int64_t heads_size = 0;  // H * Dv: a row of the attention's output
  int64_t out_size = 0;
  bool joined = false;  // q, k and v lie side by side

  AttentionDesc asked;  // desc.attention with its sizes
  std::optional<Plan> train, infer, step;
  const linear::Kernel* linear = nullptr;
  Executor* executor = nullptr;
  uint64_t fingerprint = 0;

  WeightLayout weights[kNumWeightKinds];
  size_t weights_bytes = 0;
  PackedLayout packed;  // of query, key, value, out

  Activations reserve;
  ForwardScratch forward;
  BackwardScratch backward;
  HeadGradients gradients;

  bool out_projected() const { return desc.out_proj_size > 0; }
  int64_t tokens_q() const { return desc.batch * desc.beam * desc.seqlen_q; }
  int64_t tokens_k() const { return desc.batch * desc.beam_kv * desc.seqlen_k; }
  // Whether attention may write to the caller's out at once.
  bool attention_writes_out() const { return !out_projected() && !desc.residual; }
};

// checks_desc.cc: everything but what plan() checks itself.
Status check_layer_desc(const LayerDesc& desc);

// weight_layout.cc
void lay_out_weights(LayerState& state, MemoryMap& map);
LayerWeights tensors_of(const LayerState& state, void* buffer);
Tensor& weight_of(LayerWeights& weights, WeightKind kind);
const Tensor& weight_of(const LayerWeights& weights, WeightKind kind);

// layer.cc: what layer() makes, for a caller who keeps the gradients of q, k and v in the workspace, or not.
Result<std::shared_ptr<const LayerState>> make_layer_state(const LayerDesc& desc, const PlanOptions& options,
                                                           bool gradients_in_workspace);

// memory.cc: fills the maps. False if they leave the address space.
bool lay_out_memory(LayerState& state);
uint64_t fingerprint_of(const LayerDesc& desc);

}  // namespace polyhead
