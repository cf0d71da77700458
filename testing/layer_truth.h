// What a layer should give, by plain loops over the formulas of polyhead/layer.h that share no code with the library's
// layer, attention or products: exactly, and as the yardstick of error (errors.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "polyhead/layer.h"
#include "polyhead/tensor.h"

namespace polyhead::testing::truth {

// A dense row-major array of numbers that an array of `dtype` holds.
struct Numbers {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> dims;  // empty: not given
  std::vector<double> values;

  Numbers() = default;
  Numbers(DType type, std::vector<int64_t> sizes);  // zeros
  bool given() const { return !dims.empty(); }
  int64_t size() const { return static_cast<int64_t>(values.size()); }
  double at(int64_t n) const { return values[static_cast<size_t>(n)]; }
};

// The results of a layer's calls. Where inputs are one tensor, their gradients are one too: that of the first.
enum LayerResult : size_t {
  kLayerOut,
  kLayerAttnWeights,
  kLayerGradQuery,
  kLayerGradKey,
  kLayerGradValue,
  kLayerGradAttnBias,
  kLayerGradAlibiSlopes,
  kLayerGradSinkLogits,
  kLayerGradWeights,                                         // of WeightKind n: + n
  kLayerGradCaptures = kLayerGradWeights + kNumWeightKinds,  // of what a program captures, in its order
};
inline constexpr size_t kNumLayerResults = kLayerGradCaptures + Program::kMostCaptures;
inline constexpr const char* kLayerResultNames[kNumLayerResults] = {"out",
                                                                    "attn_weights",
                                                                    "grad_query",
                                                                    "grad_key",
                                                                    "grad_value",
                                                                    "grad_attn_bias",
                                                                    "grad_alibi_slopes",
                                                                    "grad_sink_logits",
                                                                    "grad_query_weight",
                                                                    "grad_key_weight",
                                                                    "grad_value_weight",
                                                                    "grad_out_weight",
                                                                    "grad_query_bias",
                                                                    "grad_key_bias",
                                                                    "grad_value_bias",
                                                                    "grad_out_bias",
                                                                    "grad_captures[0]",
                                                                    "grad_captures[1]",
                                                                    "grad_captures[2]",
                                                                    "grad_captures[3]",
                                                                    "grad_captures[4]",
                                                                    "grad_captures[5]",
                                                                    "grad_captures[6]",
                                                                    "grad_captures[7]"};
using LayerResults = std::array<Numbers, kNumLayerResults>;

// The numbers of a forward and a backward call.
struct LayerNumbers {
  Numbers query, key, value, residual;              // [batch, beam, time, vector]
  bool key_is_query = false, value_is_key = false;  // one tensor, which has one gradient
  std::array<Numbers, kNumWeightKinds> weights;
  Numbers attn_mask, attn_bias, alibi_slopes, sink_logits;
  std::vector<Numbers> captures;                // of the program
  Numbers seqlens_q, seqlens_k, query_offsets;  // [batch, beam]; seqlens_k [batch, beam_kv]
  Numbers window_lo, window_hi;
  uint64_t dropout_seed = 0, output_dropout_seed = 0;
  uint32_t dropout_offset = 0, output_dropout_offset = 0;
  Numbers grad_out;                                   // not given: no gradients
  std::array<Numbers, kNumWeightKinds> grad_weights;  // those that are given are added to (ADD)
};

struct LayerTruth {
  LayerResults exact;      // float64 arithmetic and results; long double arithmetic with float64 inputs
  LayerResults yardstick;  // float32 arithmetic (float64 with float64 inputs); what is stored on the way is rounded,
                           // and so is L, from which backward takes P
  LayerResults magnitude;  // for each element the sum of the absolute values of its terms; of attn_weights, themselves
};
LayerTruth layer_truth(const LayerDesc& desc, const LayerNumbers& in);

}  // namespace polyhead::testing::truth
