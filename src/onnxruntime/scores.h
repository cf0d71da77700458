// The scores that ONNX's Attention can return. Attention never stores them: they are computed beside it.
#pragma once

#include "call.h"

namespace polyhead::onnxruntime {

enum class Scores : int64_t {
  kPlain = 0,   // scale * Q K^T
  kCapped = 1,  // and the softcap
  kMasked = 2,  // and the bias, -inf where hidden
};

// scores [batch, heads, queries, all keys], of which those from desc.seqlen_k on are hidden; desc and args are those of
// the attention, `key` [batch, all keys, heads, dim].
Status write_scores(Call& call, Scores kind, const AttentionDesc& desc, const ForwardArgs& args, const Tensor& key,
                    const Tensor& scores);

}  // namespace polyhead::onnxruntime
