// The model's parameters in one array, under GPT-2's names and in GPT-2's shapes; so are gradients and moments.
#pragma once

#include <string>
#include <vector>

#include "model_desc.h"
#include "polyhead/layer.h"

namespace polyhead::demo {

struct Parameter {
  std::string name;  // "h.0.attn.c_attn.weight"
  int64_t offset = 0;
  std::vector<int64_t> dims;  // a matrix is [in, out]

  int64_t size() const { return dims.size() == 2 ? dims[0] * dims[1] : dims[0]; }
  /// Its tensor in an array of Parameters::size() floats.
  Tensor in(float* memory) const;
};

class Parameters {
 public:
  explicit Parameters(const ModelDesc& desc);

  const std::vector<Parameter>& all() const { return all_; }
  int64_t size() const { return size_; }                  // of the array, in floats; gaps between parameters are zeros
  int64_t num_decaying() const { return num_decaying_; }  // matrices come first: those that weight decay takes part in

  /// GPT-2's: matrices normal with deviation 0.02, smaller by sqrt(2 num_layers) where they add to x; biases 0, factors
  /// of norms 1.
  void initialize(uint64_t seed, float* memory) const;

 private:
  void add(std::string name, std::vector<int64_t> dims);

  int64_t num_layers_;
  std::vector<Parameter> all_;
  int64_t size_ = 0, num_decaying_ = 0;
};

/// Of one layer: what the two blocks take.
struct LayerParameters {
  NormWeights attention_norm;
  LayerWeights attention;
  FeedForwardWeights feed_forward;
};

/// All parameters, or their gradients, as views.
struct ModelParameters {
  float* byte_vectors = nullptr;      // wte [256, size]
  float* position_vectors = nullptr;  // wpe [context, size]
  std::vector<LayerParameters> layers;
  NormWeights norm;  // ln_f
};

Result<ModelParameters> bind(const ModelDesc& desc, const Parameters& parameters, float* memory);

}  // namespace polyhead::demo
