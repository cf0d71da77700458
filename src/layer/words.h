// A layer in the words that `polyhead mha` reads: "--batch 8 --heads 16 --seqlen-q 384 --q-size 1024 --biases=qo".
#pragma once

#include <cstdint>
#include <string>

#include "polyhead/layer.h"

namespace polyhead {

struct LayerSize {
  const char* option;
  int64_t LayerDesc::*field;
};
// In an order in which each default follows from the sizes before it. A line names the first four always.
inline constexpr int kNumLeadingLayerSizes = 4;
inline constexpr LayerSize kLayerSizes[] = {
    {"--batch", &LayerDesc::batch},
    {"--heads", &LayerDesc::num_heads},
    {"--seqlen-q", &LayerDesc::seqlen_q},
    {"--q-size", &LayerDesc::query_size},
    {"--beam", &LayerDesc::beam},
    {"--beam-kv", &LayerDesc::beam_kv},
    {"--kv-heads", &LayerDesc::num_heads_kv},
    {"--seqlen-k", &LayerDesc::seqlen_k},
    {"--k-size", &LayerDesc::key_size},
    {"--v-size", &LayerDesc::value_size},
    {"--q-proj", &LayerDesc::query_proj_size},
    {"--k-proj", &LayerDesc::key_proj_size},
    {"--v-proj", &LayerDesc::value_proj_size},
    {"--o-proj", &LayerDesc::out_proj_size},
};

// What a size behind the leading ones is where a line does not name it.
int64_t default_layer_size(const LayerDesc& desc, int64_t LayerDesc::*field);

struct LayerBias {
  char letter;
  bool LayerDesc::*field;
};
inline constexpr LayerBias kLayerBiases[] = {{'q', &LayerDesc::query_bias},
                                             {'k', &LayerDesc::key_bias},
                                             {'v', &LayerDesc::value_bias},
                                             {'o', &LayerDesc::out_bias}};

// All but the options of the attention inside, with which options_in_words() goes on.
std::string layer_in_words(const LayerDesc& desc);

}  // namespace polyhead
