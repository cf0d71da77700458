// The blocks of a transformer as Python's layers call them: weights as torch stores them, [out, in], each with any
// strides and used in place; blocks remembered by what they compute; memory of the calling thread.
//   H num_heads   G num_heads_kv   D, Dv head dims
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "polyhead/block.h"

namespace polyhead::python {

// Tensors that are inputs, or their gradients; not given: there is none, or nobody asks for it.
struct AttentionBlockTensors {
  Tensor query = {};  // [batch, seqlen_q, query_size]
  Tensor key = {};    // [batch, seqlen_k, key_size]; not given: it is query
  Tensor value = {};  // [batch, seqlen_k, value_size]; not given: it is key

  Tensor in_proj_weight = {};   // [(H + 2 G) * D, query_size]: rows of q, of k, of v; or the next three
  Tensor q_proj_weight = {};    // [H * D, query_size]
  Tensor k_proj_weight = {};    // [G * D, key_size]
  Tensor v_proj_weight = {};    // [G * Dv, value_size]
  Tensor in_proj_bias = {};     // [H * D + G * D + G * Dv]
  Tensor out_proj_weight = {};  // [out_size, H * Dv]
  Tensor out_proj_bias = {};    // [out_size]
  NormWeights norm = {};

  Tensor attn_bias = {};  // 4-D
  Tensor attn_mask = {};  // 4-D; has no gradient
};

// The dropout_offset of every block's output; that of the dropout before it is 0. So one seed may serve both. The same is
// in polyhead/torch/_block_composition.py.
inline constexpr uint32_t kOutputDropoutOffset = 1;

struct AttentionBlockCall {
  AttentionBlockTensors in = {};
  std::optional<uint64_t> dropout_seed = {};
  std::optional<uint64_t> output_dropout_seed = {};
  int64_t num_heads = 1;
  int64_t num_heads_kv = 1;
  bool causal = false;  // query i sees keys 0 .. i
  std::optional<double> scale = {};
  double dropout_p = 0;
  double output_dropout_p = 0;
  ReturnWeights return_weights = ReturnWeights::kNone;
  NormDesc norm = {};  // its gamma and beta are set by the tensors
  bool residual = false;
};

// Where a call of a block computes, and its workspace there, of as many bytes as the block says for its direction.
struct BlockMemory {
  Where where = {};
  void* workspace = nullptr;
};

// What a call computes; an error names the weight whose shape makes no sense.
Result<AttentionBlockDesc> block_desc(const AttentionBlockCall& call);

// The block of a desc on a device and its threads, out of at most 256 remembered ones; all are forgotten when there would
// be more. The stream is each call's own. Any thread.
Result<std::shared_ptr<const AttentionBlock>> cached_block(const AttentionBlockDesc& desc, const Where& where,
                                                           std::string_view kernel = {});

// Likewise a layer without a block around it.
Result<std::shared_ptr<const Layer>> cached_layer(const LayerDesc& desc, const Where& where, std::string_view kernel);

// reserve: of reserve_words(), or not given: inference, without dropout.
Status run_forward(const AttentionBlock& block, const AttentionBlockCall& call, const BlockMemory& memory,
                   const Tensor& out, const Tensor& attn_weights, const Tensor& reserve);

// Fills those of `gradients` that are given; at least one is.
Status run_backward(const AttentionBlock& block, const AttentionBlockCall& call, const BlockMemory& memory,
                    const Tensor& reserve, const Tensor& grad_out, const AttentionBlockTensors& gradients);

struct FeedForwardTensors {
  Tensor x = {};        // [batch, seqlen, size]
  Tensor weight1 = {};  // [inner_size, size]
  Tensor bias1 = {};    // [inner_size]
  Tensor weight2 = {};  // [size, inner_size]
  Tensor bias2 = {};    // [size]
  NormWeights norm = {};
};

struct FeedForwardCall {
  FeedForwardTensors in = {};
  std::optional<uint64_t> inner_dropout_seed = {};
  std::optional<uint64_t> output_dropout_seed = {};
  ActivationKind activation = ActivationKind::kRelu;
  double inner_dropout_p = 0;
  double output_dropout_p = 0;
  NormDesc norm = {};
  bool residual = false;
};

Result<FeedForwardBlockDesc> block_desc(const FeedForwardCall& call);
Result<std::shared_ptr<const FeedForwardBlock>> cached_block(const FeedForwardBlockDesc& desc, const Where& where);
Status run_forward(const FeedForwardBlock& block, const FeedForwardCall& call, const BlockMemory& memory,
                   const Tensor& out, const Tensor& reserve);
Status run_backward(const FeedForwardBlock& block, const FeedForwardCall& call, const BlockMemory& memory,
                    const Tensor& reserve, const Tensor& grad_out, const FeedForwardTensors& gradients);

// Elements of a reserve's tensor, which is int64 because any bits are one. As much as the block wants, and a little
// more: a formula of sizes alone, so that torch.compile knows it of sizes that have no value yet. The same is in
// polyhead/torch/_block_ops.py.
int64_t reserve_words(const AttentionBlockDesc& desc);
int64_t reserve_words(const FeedForwardBlockDesc& desc);

// Whether forward writes a reserve: it is kept for backward, or there is dropout, which forward has in training alone.
bool takes_reserve(const AttentionBlockCall& call, bool keep);
bool takes_reserve(const FeedForwardCall& call, bool keep);
// `view` as the reserve of a backward call, if it can be one of that many words.
Status check_reserve(const Tensor& view, int64_t words);

// The shape of the weights that forward returns, without data; not given where it returns none.
Tensor weights_shape(const AttentionBlockDesc& desc);

// The sizes under which a call is counted and reported: of attention, or of tokens as one head of x and its inner half.
AttentionDesc counted_sizes(const AttentionBlockDesc& desc);
AttentionDesc counted_sizes(const FeedForwardBlockDesc& desc);

}  // namespace polyhead::python
