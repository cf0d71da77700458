#include <algorithm>
#include <utility>

#include "attention_part.h"

namespace polyhead::demo {
namespace {

class FusedAttention final : public AttentionPart {
 public:
  explicit FusedAttention(AttentionBlock block) : block_(std::move(block)) {}

  size_t saved_bytes() const override { return block_.reserve_bytes(); }
  size_t workspace_bytes() const override {
    return std::max(block_.workspace_bytes(), block_.backward_workspace_bytes());
  }

  Status forward(const AttentionWeights& weights, const float* x, const AttentionMemory& memory,
                 float* out) const override {
    AttentionBlockForwardArgs args = forward_args(weights, x, memory);
    args.layer.out = rows(out);
    return block_.forward(args);
  }

  Status backward(const AttentionWeights& weights, const float* x, const AttentionMemory& memory, const float* grad_out,
                  const AttentionWeights& gradients, float* grad_x) const override {
    AttentionBlockBackwardArgs args;
    args.forward = forward_args(weights, x, memory);
    args.grad_out = rows(grad_out);
    args.grad_query = rows(grad_x);
    args.grad_weights = gradients.layer;
    args.grad_norm = gradients.norm;
    return block_.backward(args);
  }

 private:
  Tensor rows(const float* data) const {
    const LayerDesc& layer = block_.desc().layer;
    return Tensor(data, DType::kFloat32, {layer.batch, layer.seqlen_q, layer.query_size});
  }

  AttentionBlockForwardArgs forward_args(const AttentionWeights& weights, const float* x,
                                         const AttentionMemory& memory) const {
    AttentionBlockForwardArgs args;
    args.layer.query = rows(x);
    args.layer.weights = weights.layer;
    args.norm = weights.norm;
    args.layer.reserve = memory.saved;
    args.layer.reserve_bytes = saved_bytes();
    args.layer.workspace = memory.workspace;
    args.layer.workspace_bytes = workspace_bytes();
    return args;
  }

  AttentionBlock block_;
};

}  // namespace

Result<std::unique_ptr<AttentionPart>> fused_attention(const ModelDesc& desc) {
  Result<AttentionBlock> block = attention_block(attention_block_desc(desc));
  if (!block.ok()) return block.status();
  return std::unique_ptr<AttentionPart>(std::make_unique<FusedAttention>(std::move(*block)));
}

}  // namespace polyhead::demo
