// A layer to test with, and random numbers for it.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "polyhead/layer.h"
#include "testing/operands.h"

namespace polyhead::testing {

struct LayerProblem {
  std::string name;
  LayerDesc desc;
  bool key_is_query = false;      // one tensor for both; they also have one gradient then
  bool value_is_key = false;      // likewise
  bool separate_weights = false;  // tensors of their own, in all kinds of layouts; else one buffer
  uint64_t seed = 1;
};

// The numbers of a forward and a backward call, densely stored: [batch, beam, time, vector].
struct LayerInputs {
  Array query, key, value, residual;
  std::array<Array, kNumWeightKinds> weights;
  Array attn_mask, attn_bias, alibi_slopes, sink_logits;
  Array seqlens_q, seqlens_k, query_offsets, window_lo, window_hi;
  uint64_t dropout_seed = 0, output_dropout_seed = 0;
  uint32_t dropout_offset = 0, output_dropout_offset = 0;
  Array grad_out;
};

// Sizes that the desc implies.
int64_t head_dim_of(const LayerDesc& desc);
int64_t head_dim_v_of(const LayerDesc& desc);
int64_t out_size_of(const LayerDesc& desc);
std::vector<int64_t> weight_dims(const LayerDesc& desc, WeightKind kind);  // empty: no such weight

LayerInputs random_inputs(const LayerProblem& problem);

// The options of layers, crossed: each in several company, with every dtype set by the test.
std::vector<LayerProblem> layer_problems();

// Any legal layer of small sizes, all options mixed.
LayerProblem random_layer_problem(uint64_t seed);

}  // namespace polyhead::testing
