// The model: GPT-2's architecture over bytes, small enough to train in minutes.
//   x = wte[byte] + wpe[position]                          [batch, context, size]
//   num_layers times:  x = AttentionBlock(x), x = FeedForwardBlock(x)
//   logits = norm(x) wte^T                                 [batch, context, 256]
#pragma once

#include <cstdint>

#include "polyhead/block.h"

namespace polyhead::demo {

inline constexpr int64_t kNumBytes = 256;
inline constexpr double kNormEps = 1e-5;

struct ModelDesc {
  int64_t batch = 4;
  int64_t context = 256;  // bytes of a sequence
  int64_t size = 256;     // of the vector of a byte
  int64_t inner_size = 1024;
  int64_t num_heads = 4;
  int64_t num_layers = 4;

  int64_t num_rows() const { return batch * context; }
  int64_t head_dim() const { return size / num_heads; }
};

/// An error that names the size that is out of range or does not divide another.
Status check_model_desc(const ModelDesc& desc);

/// Self-attention of sequences of `context` bytes; `batch` of them.
LayerDesc layer_desc(const ModelDesc& desc, int64_t batch);
AttentionBlockDesc attention_block_desc(const ModelDesc& desc);
FeedForwardBlockDesc feed_forward_block_desc(const ModelDesc& desc, int64_t batch, int64_t seqlen);

/// Of forward and backward of one batch.
///
/// With the sizes above, in MFLOP a byte: a layer's products 2 * 256 * (768 + 256 + 2 * 1024) = 1.573, its attention
/// 2 * 128.5 * 4 * (64 + 64) = 0.132, the head 2 * 256 * 256 = 0.131; backward takes twice the products and 2.5 times
/// the attention. Together 3 * (4 * 1.573 + 0.131) + 3.5 * 4 * 0.132 = 21.1, so a batch of 1024 bytes takes 21.6 GFLOP:
/// 0.08 s on two AVX-512 cores, and about 0.2 s on two AVX2 cores.
double step_flops(const ModelDesc& desc);

}  // namespace polyhead::demo
