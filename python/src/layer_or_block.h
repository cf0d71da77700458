// The layer of multi-head attention, or the block that has it between a norm and a residual: one interface for both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "blocks.h"
#include "polyhead/block.h"

namespace polyhead::python {

class LayerOrBlock {
 public:
  // norm: of a block; none: the layer. `desc.residual` is the block's.
  static Result<LayerOrBlock> made(const LayerDesc& desc, const std::optional<NormDesc>& norm, const Where& where,
                                   std::string_view kernel) {
    LayerOrBlock made;
    Status status;
    if (norm) {
      auto block = cached_block({desc, *norm}, where, kernel);
      status = block.status();
      if (status.ok()) made.block_ = std::move(*block);
    } else {
      auto layer = cached_layer(desc, where, kernel);
      status = layer.status();
      if (status.ok()) made.layer_ = std::move(*layer);
    }
    if (!status.ok()) return status;
    return made;
  }

  const LayerDesc& desc() const { return layer().desc(); }
  int64_t out_size() const { return layer().out_size(); }
  size_t workspace_bytes() const { return block_ ? block_->workspace_bytes() : layer_->workspace_bytes(); }
  size_t backward_workspace_bytes() const {
    return block_ ? block_->backward_workspace_bytes() : layer_->backward_workspace_bytes();
  }
  size_t reserve_bytes() const { return block_ ? block_->reserve_bytes() : layer_->reserve_bytes(); }

  Status forward(const LayerForwardArgs& args, const NormWeights& norm) const {
    return block_ ? block_->forward({args, norm}) : layer_->forward(args);
  }

  // Both directions of a layer's gradients; those by norm's weights where there is a block.
  Status backward(const LayerBackwardArgs& args, const NormWeights& norm, const NormWeights& grad_norm) const {
    if (!block_) {
      const Status status = layer_->backward_data(args);
      return status.ok() && any(args.grad_weights) ? layer_->backward_weights(args) : status;
    }
    AttentionBlockBackwardArgs of_block;
    of_block.forward = {args.forward, norm};
    of_block.grad_out = args.grad_out;
    of_block.grad_query = args.grad_query, of_block.grad_key = args.grad_key, of_block.grad_value = args.grad_value;
    of_block.grad_attn_bias = args.grad_attn_bias, of_block.grad_alibi_slopes = args.grad_alibi_slopes;
    of_block.grad_sink_logits = args.grad_sink_logits, of_block.grad_captures = args.grad_captures;
    of_block.grad_weights = args.grad_weights;
    of_block.grad_norm = grad_norm;
    return block_->backward(of_block);
  }

 private:
  const Layer& layer() const { return block_ ? block_->layer() : *layer_; }

  static bool any(const LayerWeights& weights) {
    for (int i = 0; i < kNumWeightKinds; ++i) {
      if (weights[static_cast<WeightKind>(i)].given()) return true;
    }
    return false;
  }

  std::shared_ptr<const Layer> layer_;  // one of the two
  std::shared_ptr<const AttentionBlock> block_;
};

}  // namespace polyhead::python
