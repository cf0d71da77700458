// The two blocks of a transformer, each one call forward and one backward:
//   AttentionBlock      y = x + dropout(layer(norm(x)))                            pre-norm; layer: polyhead/layer.h
//                       y = norm(x + dropout(layer(x)))                            post-norm
//   FeedForwardBlock    y = x + dropout(dropout(activation(norm(x) W1 + b1)) W2 + b2)            likewise
// Without residual, "x +" is left out. Attention to another sequence takes key and value as they are, without norm. Where they
// compute is told as a layer is told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "polyhead/api.h"
#include "polyhead/layer.h"
#include "polyhead/matrix_product.h"

namespace polyhead {

/// A norm over the vector, and where it stands.
struct NormDesc {
  NormKind kind = NormKind::kLayerNorm;
  bool pre = true;    ///< of the input; false: of the sum (post-norm)
  double eps = 1e-5;  ///< positive; BERT's is 1e-12, Keras' 1e-3
  bool gamma = true;  ///< with a factor, [size]
  bool beta = true;   ///< with a summand, [size]; usually off for kRmsNorm

  bool operator==(const NormDesc&) const = default;  ///< field by field
};

/// gamma and beta, or their gradients: [size], float32 or the block's dtype; given as the desc says.
struct NormWeights {
  Tensor gamma = {};
  Tensor beta = {};
};

struct AttentionBlockDesc {
  /// residual: whether x is added, which needs a layer whose out is as long as query. output_dropout_p is the block's.
  LayerDesc layer = {};
  NormDesc norm = {};

  bool operator==(const AttentionBlockDesc&) const = default;  ///< field by field
};

struct AttentionBlockForwardArgs {
  /// query is x. key and value: not given, x (normed, if norm comes first) attends to itself; else both are given.
  /// residual is not given: it is x. Reserve and workspace are the block's. No key_cache, value_cache or step; with
  /// layer.cache, whose keys come as a layer's do: slots without key and value store those of x.
  /// Unlike the layer's, padding of x and of grad_out must hold finite numbers: gamma and beta get gradients from all rows.
  LayerForwardArgs layer = {};
  NormWeights norm = {};
};

/// All gradients of a block at once, each optional.
struct AttentionBlockBackwardArgs {
  AttentionBlockForwardArgs forward = {};  ///< as forward was given it, with its reserve; the workspace is this call's
  Tensor grad_out = {};
  Tensor grad_query = {};  ///< of x, the residual's share included
  Tensor grad_key = {};    ///< only where key and value are given
  Tensor grad_value = {};
  Tensor grad_attn_bias = {};
  Tensor grad_alibi_slopes = {};
  Tensor grad_sink_logits = {};
  std::span<const Tensor> grad_captures = {};  ///< as in BackwardArgs
  LayerWeights grad_weights = {};
  NormWeights grad_norm = {};
  bool accumulate = false;  ///< true: grad_weights and grad_norm are added to; the others are overwritten always
};

struct AttentionBlockState;  // src/layer/attention_block.cc

/// Immutable: one block may run on many threads at once, each call with its own tensors, workspace and reserve.
class POLYHEAD_API AttentionBlock {
 public:
  const AttentionBlockDesc& desc() const;
  /// For its weights: weights_bytes, weight_layout, weights_in, prepack_weights. Its own calls are the block's business.
  const Layer& layer() const;

  size_t workspace_bytes() const;  ///< of forward
  size_t backward_workspace_bytes() const;
  size_t reserve_bytes() const;

  /// Checks, then computes. reserve null: inference, without dropout. On an error no output has been touched.
  Status forward(const AttentionBlockForwardArgs& args) const;
  Status backward(const AttentionBlockBackwardArgs& args) const;

 private:
  friend Result<AttentionBlock> attention_block(const AttentionBlockDesc&, const PlanOptions&);
  AttentionBlock() = default;
  std::shared_ptr<const AttentionBlockState> state_;
};
POLYHEAD_API Result<AttentionBlock> attention_block(const AttentionBlockDesc& desc, const PlanOptions& options = {});

struct FeedForwardBlockDesc {
  int64_t batch = 1;
  int64_t seqlen = 0;
  int64_t size = 0;        ///< of a vector of x and y
  int64_t inner_size = 0;  ///< between the products
  ActivationKind activation = ActivationKind::kGelu;
  bool bias1 = true;
  bool bias2 = true;
  double inner_dropout_p = 0;   ///< after the activation; in training only, like the next
  double output_dropout_p = 0;  ///< before the residual
  bool residual = true;
  NormDesc norm = {};
  DType dtype = DType::kFloat32;  ///< of all tensors: float32, bfloat16, float16, float64

  bool operator==(const FeedForwardBlockDesc&) const = default;  ///< field by field
};

/// The weights of a block, or their gradients; any strides.
struct FeedForwardWeights {
  Tensor weight1 = {};  ///< [size, inner_size]
  Tensor bias1 = {};    ///< [inner_size], if desc.bias1
  Tensor weight2 = {};  ///< [inner_size, size]
  Tensor bias2 = {};    ///< [size], if desc.bias2
  NormWeights norm = {};
};

struct FeedForwardBlockForwardArgs {
  Tensor x = {};  ///< [batch, seqlen, size], any strides
  FeedForwardWeights weights = {};
  /// Dropout's masks are those of dropout_mask([batch, 1, seqlen, inner_size]), and of [batch, 1, seqlen, size]. In
  /// training, a dropout above 0 needs a seed, any number, and the two must differ in seed or offset.
  std::optional<uint64_t> inner_dropout_seed = {};
  std::optional<uint64_t> output_dropout_seed = {};
  uint32_t inner_dropout_offset = 0;
  uint32_t output_dropout_offset = 0;
  Tensor out = {};          ///< [batch, seqlen, size]
  void* reserve = nullptr;  ///< null: inference
  size_t reserve_bytes = 0;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  /// Optional: weight1 and weight2 as prepack_weights() wrote them. Forward then reads these, for the same bits in less
  /// time, and of `weights` the rest alone; backward reads `weights`.
  const void* prepacked_weights = nullptr;
  size_t prepacked_weights_bytes = 0;
  Where where = {};  ///< as in LayerForwardArgs
};

struct FeedForwardBlockBackwardArgs {
  FeedForwardBlockForwardArgs forward =
      {};  ///< as forward was given it, with its reserve; the workspace is this call's
  Tensor grad_out = {};
  Tensor grad_x = {};                    ///< optional
  FeedForwardWeights grad_weights = {};  ///< each optional
  bool accumulate = false;               ///< true: grad_weights are added to
};

struct FeedForwardBlockState;  // src/layer/feed_forward_block.cc

class POLYHEAD_API FeedForwardBlock {
 public:
  const FeedForwardBlockDesc& desc() const;
  const char* kernel_name() const;  ///< of the products

  /// weight1 and weight2 prepacked once for many forward calls, as Layer::prepack_weights() does.
  size_t prepacked_weights_bytes() const;
  Status prepack_weights(const FeedForwardWeights& weights, void* prepacked, size_t bytes,
                         const Where& where = {}) const;

  size_t workspace_bytes() const;  ///< of forward
  size_t backward_workspace_bytes() const;
  size_t reserve_bytes() const;

  Status forward(const FeedForwardBlockForwardArgs& args) const;
  Status backward(const FeedForwardBlockBackwardArgs& args) const;

 private:
  friend Result<FeedForwardBlock> feed_forward_block(const FeedForwardBlockDesc&, const PlanOptions&);
  FeedForwardBlock() = default;
  std::shared_ptr<const FeedForwardBlockState> state_;
};
POLYHEAD_API Result<FeedForwardBlock> feed_forward_block(const FeedForwardBlockDesc& desc,
                                                         const PlanOptions& options = {});

}  // namespace polyhead
