#include "layer/words.h"

#include <algorithm>
#include <iterator>

#include "attention/words.h"
#include "core/sentence.h"

namespace polyhead {

int64_t default_layer_size(const LayerDesc& desc, int64_t LayerDesc::*field) {
  if (field == &LayerDesc::num_heads_kv) return desc.num_heads;
  if (field == &LayerDesc::seqlen_k) return desc.seqlen_q;
  if (field == &LayerDesc::key_size || field == &LayerDesc::out_proj_size) return desc.query_size;
  if (field == &LayerDesc::value_size) return desc.key_size;
  if (field == &LayerDesc::query_proj_size) {
    return std::max<int64_t>(desc.query_size / std::max<int64_t>(desc.num_heads, 1), 1);
  }
  if (field == &LayerDesc::key_proj_size || field == &LayerDesc::value_proj_size) return desc.query_proj_size;
  return 1;  // beams
}

std::string layer_in_words(const LayerDesc& desc) {
  std::string line;
  const auto add = [&](const auto&... parts) { line += sentence(line.empty() ? "" : " ", parts...); };
  for (int i = 0; i < static_cast<int>(std::size(kLayerSizes)); ++i) {
    const auto& [option, field] = kLayerSizes[i];
    const bool is_default = i >= kNumLeadingLayerSizes && desc.*field == default_layer_size(desc, field);
    if (!is_default) add(option, " ", desc.*field);
  }
  std::string biases;
  for (const auto& [letter, field] : kLayerBiases) {
    if (desc.*field) biases += letter;
  }
  if (!biases.empty()) add("--biases=", biases);
  if (desc.residual) add("--residual");
  if (desc.output_dropout_p != 0) add("--output-dropout ", number_word(desc.output_dropout_p));
  if (desc.has_windows) add("--windows");
  return line;
}

}  // namespace polyhead
