#include "rows.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"
#include "model_desc.h"
#include "parallel.h"

namespace polyhead::demo {
namespace {

constexpr int64_t kRowsPerPiece = 32;
constexpr int64_t kColumnsPerPiece = 64;

float* floats(const Tensor& t) { return static_cast<float*>(t.data); }

}  // namespace

void embed(const uint8_t* inputs, int64_t num_rows, int64_t context, int64_t size, const float* byte_vectors,
           const float* position_vectors, float* x) {
  for_each_piece(num_rows, kRowsPerPiece, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* byte = byte_vectors + inputs[row] * size;
      const float* position = position_vectors + row % context * size;
      for (int64_t c = 0; c < size; ++c) x[row * size + c] = byte[c] + position[c];
    }
  });
}

void embed_backward(const uint8_t* inputs, const float* grad_x, int64_t num_rows, int64_t context, int64_t size,
                    float* grad_byte_vectors, float* grad_position_vectors) {
  std::fill_n(grad_position_vectors, context * size, 0.0f);
  for_each_piece(size, kColumnsPerPiece, [&](int64_t begin, int64_t end) {
    for (int64_t row = 0; row < num_rows; ++row) {
      float* byte = grad_byte_vectors + inputs[row] * size;
      float* position = grad_position_vectors + row % context * size;
      const float* from = grad_x + row * size;
      for (int64_t c = begin; c < end; ++c) byte[c] += from[c];
      for (int64_t c = begin; c < end; ++c) position[c] += from[c];
    }
  });
}

void norm_forward(const float* x, const NormWeights& weights, int64_t num_rows, int64_t size, float* y,
                  const NormStatistics& statistics) {
  const float *gamma = floats(weights.gamma), *beta = floats(weights.beta);
  const auto count = static_cast<float>(size);
  for_each_piece(num_rows, kRowsPerPiece, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = x + row * size;
      float* to = y + row * size;
      const float mean = sum_of(size, [&](int64_t c) { return from[c]; }) / count;
      const float variance = sum_of(size, [&](int64_t c) { return (from[c] - mean) * (from[c] - mean); }) / count;
      const float rstd = 1 / std::sqrt(variance + static_cast<float>(kNormEps));
      for (int64_t c = 0; c < size; ++c) to[c] = (from[c] - mean) * rstd * gamma[c] + beta[c];
      if (statistics.mean != nullptr) statistics.mean[row] = mean, statistics.rstd[row] = rstd;
    }
  });
}

// With u = (x - mean) * rstd and g = grad_y * gamma:  grad_x = rstd * (g - mean(g) - u * mean(g u)) + residual
void norm_backward(const NormGradient& gradient, const NormWeights& weights, const NormWeights& grad_weights,
                   int64_t num_rows, int64_t size) {
  const float *x = gradient.x, *dy = gradient.grad_y, *residual = gradient.residual, *gamma = floats(weights.gamma);
  const float *mean = gradient.statistics.mean, *rstd = gradient.statistics.rstd;
  const auto count = static_cast<float>(size);
  for_each_piece(num_rows, kRowsPerPiece, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *from = x + row * size, *above = dy + row * size;
      const float middle = mean[row], scale = rstd[row];
      float* to = gradient.grad_x + row * size;
      const auto unit = [&](int64_t c) { return (from[c] - middle) * scale; };
      const float sum = sum_of(size, [&](int64_t c) { return above[c] * gamma[c]; }) / count;
      const float sum_unit = sum_of(size, [&](int64_t c) { return above[c] * gamma[c] * unit(c); }) / count;
      for (int64_t c = 0; c < size; ++c) to[c] = scale * (above[c] * gamma[c] - sum - unit(c) * sum_unit);
      if (residual == nullptr) continue;
      for (int64_t c = 0; c < size; ++c) to[c] += residual[row * size + c];
    }
  });
  float *grad_gamma = floats(grad_weights.gamma), *grad_beta = floats(grad_weights.beta);
  for_each_piece(size, kColumnsPerPiece, [&](int64_t begin, int64_t end) {
    std::fill(grad_gamma + begin, grad_gamma + end, 0.0f);
    std::fill(grad_beta + begin, grad_beta + end, 0.0f);
    for (int64_t row = 0; row < num_rows; ++row) {
      const float *from = x + row * size, *above = dy + row * size;
      const float middle = mean[row], scale = rstd[row];
      for (int64_t c = begin; c < end; ++c) grad_gamma[c] += above[c] * (from[c] - middle) * scale;
      for (int64_t c = begin; c < end; ++c) grad_beta[c] += above[c];
    }
  });
}

void sum_columns(const float* x, int64_t num_rows, int64_t num_columns, float* sums) {
  for_each_piece(num_columns, kColumnsPerPiece, [&](int64_t begin, int64_t end) {
    std::fill(sums + begin, sums + end, 0.0f);
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int64_t c = begin; c < end; ++c) sums[c] += x[row * num_columns + c];
    }
  });
}

double cross_entropy(float* logits, const uint8_t* targets, int64_t num_rows) {
  std::vector<double> losses(static_cast<size_t>(num_rows));
  const float share = 1 / static_cast<float>(num_rows);
  for_each_piece(num_rows, kRowsPerPiece, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* x = logits + row * kNumBytes;
      const float most = max_of(x, kNumBytes), target = x[targets[row]] - most;
      for (int64_t c = 0; c < kNumBytes; ++c) x[c] = exp_of_negative(x[c] - most);
      const float sum = sum_of(kNumBytes, [&](int64_t c) { return x[c]; });
      losses[static_cast<size_t>(row)] = std::log(static_cast<double>(sum)) - static_cast<double>(target);
      for (int64_t c = 0; c < kNumBytes; ++c) x[c] *= share / sum;
      x[targets[row]] -= share;
    }
  });
  double sum = 0;
  for (const double loss : losses) sum += loss;
  return sum / static_cast<double>(num_rows);
}

}  // namespace polyhead::demo
