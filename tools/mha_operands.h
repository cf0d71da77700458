// The tensors of a layer's calls, drawn from a problem's seed, and the calls.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "mha_problem.h"
#include "operands.h"
#include "polyhead/layer.h"
#include "testing/layer_truth.h"

namespace polyhead::tools {
using namespace testing::truth;

// The weights by WeightKind, with their names in files: those of the source "polyhead" (polyhead/weights.h).
struct WeightField {
  const char* name;
  Tensor LayerWeights::*field;
};
inline constexpr WeightField kWeightFields[kNumWeightKinds] = {
    {"query_weight", &LayerWeights::query},    {"key_weight", &LayerWeights::key},
    {"value_weight", &LayerWeights::value},    {"out_weight", &LayerWeights::out},
    {"query_bias", &LayerWeights::query_bias}, {"key_bias", &LayerWeights::key_bias},
    {"value_bias", &LayerWeights::value_bias}, {"out_bias", &LayerWeights::out_bias}};

// The inputs of a forward call that are not weights, and where the truth takes their numbers.
struct InputField {
  const char* name;
  Tensor LayerForwardArgs::*field;
  Numbers LayerNumbers::*numbers;
};
inline constexpr InputField kInputFields[] = {
    {"query", &LayerForwardArgs::query, &LayerNumbers::query},
    {"key", &LayerForwardArgs::key, &LayerNumbers::key},
    {"value", &LayerForwardArgs::value, &LayerNumbers::value},
    {"residual", &LayerForwardArgs::residual, &LayerNumbers::residual},
    {"attn_mask", &LayerForwardArgs::attn_mask, &LayerNumbers::attn_mask},
    {"attn_bias", &LayerForwardArgs::attn_bias, &LayerNumbers::attn_bias},
    {"alibi_slopes", &LayerForwardArgs::alibi_slopes, &LayerNumbers::alibi_slopes},
    {"sink_logits", &LayerForwardArgs::sink_logits, &LayerNumbers::sink_logits},
    {"seqlens_q", &LayerForwardArgs::seqlens_q, &LayerNumbers::seqlens_q},
    {"seqlens_k", &LayerForwardArgs::seqlens_k, &LayerNumbers::seqlens_k},
    {"query_offsets", &LayerForwardArgs::query_offsets, &LayerNumbers::query_offsets},
    {"window_lo", &LayerForwardArgs::window_lo, &LayerNumbers::window_lo},
    {"window_hi", &LayerForwardArgs::window_hi, &LayerNumbers::window_hi}};

struct MhaOperands {
  LayerForwardArgs args;         // inputs, weights and seeds
  std::vector<Tensor> captures;  // args.captures
  Tensor grad_out;               // when training
  Inputs options;                // whose memory holds masks, lengths and the like
  std::vector<Buffer> buffers;
};
// Vectors are N(0, 1) and stay so through the projections. `layer` is that of layer_desc(problem).
Result<MhaOperands> random_operands(const MhaProblem& problem, const Layer& layer);

// What the calls write, by LayerResult; those that the problem does not have are not given.
struct MhaResults {
  std::array<Tensor, kNumLayerResults> of;
  std::vector<Buffer> buffers;

  LayerWeights grad_weights() const;
  void clear() const;  // sets every element to NaN
};
// Every element is NaN; of the weights' gradients, if they are to be added to, a random number.
Result<MhaResults> new_results(const MhaProblem& problem, const Layer& layer);

// The calls of one layer on operands and results, which must outlive it.
class MhaCalls {
 public:
  static Result<MhaCalls> create(const MhaProblem& problem, const Layer& layer, const MhaOperands& operands,
                                 const MhaResults& results);

  // Of all time steps. With problem.sweep, this also fills the caches.
  Status forward() const { return layer_.forward(forward_); }
  // Time step after time step, on the caches as forward() has left them.
  Status sweep() const;
  // When training, after forward(), in this order.
  Status backward_data() const { return layer_.backward_data(backward_); }
  Status backward_weights() const { return has_weights_ ? layer_.backward_weights(backward_) : Status(); }
  bool has_weights() const { return has_weights_; }

  // All that the problem asks for, once: what results then hold is that of sweep() alone, if the problem has one.
  Status run(const MhaProblem& problem) const;

 private:
  explicit MhaCalls(const Layer& layer) : layer_(layer) {}
  Status add_memory(size_t size_bytes, void** memory);
  Status add_caches(const MhaProblem& problem);
  Status prepack_weights();

  Layer layer_;
  LayerForwardArgs forward_;
  LayerBackwardArgs backward_;
  std::vector<Tensor> grad_captures_;  // backward_.grad_captures
  bool has_weights_ = false;
  std::vector<Buffer> buffers_;
};

}  // namespace polyhead::tools
