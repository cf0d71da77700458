// What linear::Epilogue does to eight elements of a row, and linear::Activation.
#pragma once

#include <cmath>

#include "core/philox.h"
#include "cuda/eight.cuh"

namespace polyhead::cuda {

constexpr float kSqrtHalf = 0.707106781f, kInverseSqrt2Pi = 0.398942280f, kSqrt2OverPi = 0.797884561f;
constexpr float kGeluCube = 0.044715f;

__device__ inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }
__device__ inline float gelu_tanh(float x) { return tanhf(kSqrt2OverPi * (x + kGeluCube * x * x * x)); }
__device__ inline float normal_distribution(float x) { return 0.5f * (1 + erff(x * kSqrtHalf)); }

__device__ inline float activated(Activated function, float x) {
  switch (function) {
    case Activated::kRelu: return x < 0 ? 0 : x;
    case Activated::kGelu: return x * normal_distribution(x);
    case Activated::kGeluTanh: return 0.5f * x * (1 + gelu_tanh(x));
    case Activated::kSilu: return x / (1 + expf(-x));
    default: return x;
  }
}

__device__ inline float derivative_of(Activated function, float x) {
  switch (function) {
    case Activated::kRelu: return x <= 0 ? 0 : x - x + 1;  // NaN stays NaN
    case Activated::kGelu: return normal_distribution(x) + x * kInverseSqrt2Pi * expf(-0.5f * x * x);
    case Activated::kGeluTanh: {
      const float t = gelu_tanh(x), slope = kSqrt2OverPi * (1 + 3 * kGeluCube * x * x);
      return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * slope;
    }
    case Activated::kSilu: {
      const float s = sigmoid(x);
      return s * (1 + x * (1 - s));
    }
    default: return 1;
  }
}

// Which of eight columns dropout keeps: a bit each.
__device__ inline unsigned kept_of_eight(const Finish& f, int row, int column) {
  const unsigned r = static_cast<unsigned>(row);
  const auto words =
      philox4x32({r / f.dropout_rows, r % f.dropout_rows, static_cast<uint32_t>(column / kEight), f.dropout_offset},
                 {static_cast<uint32_t>(f.dropout_seed), static_cast<uint32_t>(f.dropout_seed >> 32)});
  unsigned kept = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    kept |= ((words[w] & 0xffff) >= f.dropout_threshold ? 1u : 0) << 2 * w;
    kept |= (words[w] >> 16 >= f.dropout_threshold ? 2u : 0) << 2 * w;
  }
  return kept;
}

__device__ inline void drop(Eight& x, const Finish& f, int row, int column) {
  if (f.dropout_threshold == 0) return;
  const unsigned kept = kept_of_eight(f, row, column);
#pragma unroll
  for (int i = 0; i < kEight; ++i) x[i] = kept >> i & 1 ? x[i] * f.dropout_factor : 0;
}

__device__ inline void add_row(Eight& x, const View& view, int row, int column, int count) {
  if (!view.given()) return;
  Eight more;
  RowOf(view, row).load(more, column, count);
#pragma unroll
  for (int i = 0; i < kEight; ++i) x[i] += more[i];
}

// x, columns [column, column + count) of a row, finished and written.
__device__ inline void finish(Eight& x, const Finish& f, int row, int column, int count) {
  add_row(x, f.bias, 0, column, count);
  if (f.gradient) {
    drop(x, f, row, column);
    if (f.activation != Activated::kNone) {
      Eight before;
      RowOf(f.pre_activation, row).load(before, column, count);
      for_each_of(x, [&](float value, int) {
        const float slope = derivative_of(f.activation, before[0]);
        append(before, before[0]);
        return value * slope;
      });
    }
  } else {
    if (f.pre_activation.given()) RowOf(f.pre_activation, row).store(x, column, count);
    if (f.activation != Activated::kNone) {
      for_each_of(x, [&](float value, int) { return activated(f.activation, value); });
    }
    drop(x, f, row, column);
  }
  add_row(x, f.residual, row, column, count);
  if (!f.out.given()) return;
  Eight written;
#pragma unroll
  for (int i = 0; i < kEight; ++i) written[i] = x[i];
  if (f.accumulate) add_row(written, f.out, row, column, count);
  RowOf(f.out, row).store(written, column, count);
}

}  // namespace polyhead::cuda
