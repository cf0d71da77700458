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
  int64_t batch = 8;
  int64_t context = 128;  // bytes of a sequence
  int64_t size = 128;     // of the vector of a byte
  int64_t inner_size = 512;
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
/// With the sizes above, in MFLOP a byte: a layer's products 2 * 128 * (384 + 128 + 2 * 512) = 0.393, its attention
/// 2 * 64.5 * 4 * (32 + 32) = 0.033, the head 2 * 128 * 256 = 0.066; backward takes twice the products and 2.5 times
/// the attention. Together 3 * (4 * 0.393 + 0.066) + 3.5 * 4 * 0.033 = 5.4, so a batch of 1024 bytes takes 5.5 GFLOP:
/// 0.043 s on two cores of a Zen 4. Of the models tried there for 100 s this one learned most: 1.50 nats a byte; with
/// contexts of 256 it had 1.87, three layers of 192 1.60, and four of 256 did not pass the bigrams (2.78).
double step_flops(const ModelDesc& desc);

}  // namespace polyhead::demo
