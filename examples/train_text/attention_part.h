// Where bytes look at each other: out = x + attention(norm(x)), in two ways that the model can be built with.
#pragma once

#include <cstddef>
#include <memory>

#include "model_desc.h"

namespace polyhead::demo {

/// The tensors of one layer's attention, or their gradients: x, out and grad_* are [batch, context, size].
struct AttentionWeights {
  const LayerWeights& layer;
  const NormWeights& norm;
};

/// Memory of a call. `saved` is what backward needs of forward: one for each layer.
struct AttentionMemory {
  std::byte* saved = nullptr;
  std::byte* workspace = nullptr;
};

class AttentionPart {
 public:
  virtual ~AttentionPart() = default;

  virtual size_t saved_bytes() const = 0;
  virtual size_t workspace_bytes() const = 0;
  virtual Status forward(const AttentionWeights& weights, const float* x, const AttentionMemory& memory,
                         float* out) const = 0;
  /// Overwrites grad_x and what `gradients` views.
  virtual Status backward(const AttentionWeights& weights, const float* x, const AttentionMemory& memory,
                          const float* grad_out, const AttentionWeights& gradients, float* grad_x) const = 0;
};

/// polyhead's AttentionBlock.
Result<std::unique_ptr<AttentionPart>> fused_attention(const ModelDesc& desc);

/// As it stands in textbooks: a product for the scores, softmax, a product for the output, with all
/// context * context weights kept for the backward pass. The products are the library's own, packed and tuned alike, so
/// what the two differ in is the fusing. See unfused_attention.cc.
Result<std::unique_ptr<AttentionPart>> unfused_attention(const ModelDesc& desc);

}  // namespace polyhead::demo
