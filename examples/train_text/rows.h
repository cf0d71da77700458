// What the model computes row by row besides its blocks: embedding, the last norm, cross-entropy. Bits do not depend on
// the number of threads: sums over rows run in the rows' order.
#pragma once

#include <cstdint>

#include "polyhead/block.h"

namespace polyhead::demo {

/// The bytes that a batch reads, and the byte that follows each: [batch, context].
struct Bytes {
  const uint8_t* inputs = nullptr;
  const uint8_t* targets = nullptr;
};

/// x[row] = byte_vectors[inputs[row]] + position_vectors[row % context]
void embed(const uint8_t* inputs, int64_t num_rows, int64_t context, int64_t size, const float* byte_vectors,
           const float* position_vectors, float* x);

/// Adds to grad_byte_vectors, overwrites grad_position_vectors.
void embed_backward(const uint8_t* inputs, const float* grad_x, int64_t num_rows, int64_t context, int64_t size,
                    float* grad_byte_vectors, float* grad_position_vectors);

/// What norm_backward needs of the forward: [num_rows] each.
struct NormStatistics {
  float* mean = nullptr;
  float* rstd = nullptr;
};

/// y = (x - mean) * rstd * gamma + beta. `statistics` may be empty.
void norm_forward(const float* x, const NormWeights& weights, int64_t num_rows, int64_t size, float* y,
                  const NormStatistics& statistics);

struct NormGradient {
  const float* x = nullptr;
  NormStatistics statistics;
  const float* grad_y = nullptr;
  const float* residual = nullptr;  // added to grad_x; null: nothing
  float* grad_x = nullptr;
};

/// Overwrites grad_x and what grad_weights view.
void norm_backward(const NormGradient& gradient, const NormWeights& weights, const NormWeights& grad_weights,
                   int64_t num_rows, int64_t size);

/// sums[c] = sum over rows of x[row, c]
void sum_columns(const float* x, int64_t num_rows, int64_t num_columns, float* sums);

/// The mean over rows of -log softmax(logits)[target], in nats. logits [num_rows, 256] become its gradient.
double cross_entropy(float* logits, const uint8_t* targets, int64_t num_rows);

}  // namespace polyhead::demo
