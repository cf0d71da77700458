// LayerNorm and RMSNorm, forward and backward: a warp a row, eight columns a lane at a time. What is read three times lies
// in the L1 cache.
#pragma once

#include "cuda/lane_rows.cuh"
#include "cuda/rows.cuh"

namespace polyhead::cuda {

constexpr int kColumnsOfWarp = 32 * kEight;

__device__ inline float sum_of_warp(float x) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) x += __shfl_xor_sync(kAllLanes, x, half);
  return x;
}

// A row that a warp reads, of a matrix that may not be given: then all of it is `without`.
struct OptionalRow {
  RowOf row;
  float without;

  __device__ OptionalRow(const View& x, int r, float absent) : row(x, x.given() ? r : 0), without(absent) {}
  __device__ void load(Eight& x, int column, int count) const {
    if (row.view.given()) return row.load(x, column, count);
#pragma unroll
    for (int i = 0; i < kEight; ++i) x[i] = without;
  }
};

// Calls step(column, count) for the lane's columns of a row of n.
template <class Step>
__device__ void for_each_column(int n, const Step& step) {
  for (int column = static_cast<int>(threadIdx.x) % 32 * kEight; column < n; column += kColumnsOfWarp) {
    step(column, count_from(column, n));
  }
}

// What a row's norm is taken of: x, or x + residual rounded to x's type; which is `sum` once it has been written.
struct NormInput {
  RowOf x;
  const View* residual;
  int row;

  __device__ void load(Eight& values, int column, int count) const {
    x.load(values, column, count);
    if (residual == nullptr) return;
    add_row(values, *residual, row, column, count);
#pragma unroll
    for (int i = 0; i < kEight; ++i) values[i] = rounded_as(x.view.number, values[i]);
  }
};

// Mean and 1 / deviation of a row, of the elements that input.load() gives.
struct RowStatistics {
  float mean = 0, rstd = 0;

  __device__ RowStatistics(const NormProblem& p, const NormInput& input) {
    const float size = static_cast<float>(p.n);
    float sum = 0;
    if (p.centred) {
      for_each_column(p.n, [&](int column, int count) {
        Eight x;
        input.load(x, column, count);
#pragma unroll
        for (int i = 0; i < kEight; ++i) sum += x[i];  // behind the row's end stand zeros
      });
      mean = sum_of_warp(sum) / size;
    }
    sum = 0;
    for_each_column(p.n, [&](int column, int count) {
      Eight x;
      input.load(x, column, count);
#pragma unroll
      for (int i = 0; i < kEight; ++i) sum += i < count ? (x[i] - mean) * (x[i] - mean) : 0;
    });
    rstd = 1 / sqrtf(sum_of_warp(sum) / size + p.eps);
  }
};

__device__ inline void norm_forward(const NormProblem& p, int row) {
  NormInput input{RowOf(p.sum.given() ? p.sum : p.x, row), p.residual.given() && !p.sum.given() ? &p.residual : nullptr,
                  row};
  if (p.sum.given()) {
    const NormInput summed{RowOf(p.x, row), p.residual.given() ? &p.residual : nullptr, row};
    for_each_column(p.n, [&](int column, int count) {
      Eight x;
      summed.load(x, column, count);
      RowOf(p.sum, row).store(x, column, count);
    });
  }
  const RowStatistics of_row(p, input);
  if (threadIdx.x % 32 == 0) {
    if (p.centred && p.mean != nullptr) p.mean[row] = of_row.mean;
    if (p.rstd != nullptr) p.rstd[row] = of_row.rstd;
  }
  const OptionalRow gamma(p.gamma, 0, 1), beta(p.beta, 0, 0);
  for_each_column(p.n, [&](int column, int count) {
    Eight x, factor, more;
    input.load(x, column, count);
    gamma.load(factor, column, count);
    beta.load(more, column, count);
#pragma unroll
    for (int i = 0; i < kEight; ++i) x[i] = (x[i] - of_row.mean) * of_row.rstd * factor[i] + more[i];
    RowOf(p.y, row).store(x, column, count);
  });
}

// grad_x = (g - mean(g) - normed mean(g normed)) rstd,  g = grad_y gamma,  normed = (x - mean) rstd
__device__ inline void norm_backward(const NormProblem& p, int row) {
  const RowOf x_row(p.x, row), grad_row(p.grad_y, row);
  const OptionalRow gamma(p.gamma, 0, 1);
  const float mean = p.centred ? p.mean[row] : 0, rstd = p.rstd[row], size = static_cast<float>(p.n);
  const auto load = [&](Eight& normed, Eight& g, int column, int count) {
    Eight factor;
    x_row.load(normed, column, count);
    grad_row.load(g, column, count);
    gamma.load(factor, column, count);
#pragma unroll
    for (int i = 0; i < kEight; ++i) normed[i] = i < count ? (normed[i] - mean) * rstd : 0, g[i] *= factor[i];
  };
  float gradient = 0, projection = 0;
  for_each_column(p.n, [&](int column, int count) {
    Eight normed, g;
    load(normed, g, column, count);
#pragma unroll
    for (int i = 0; i < kEight; ++i) gradient += g[i], projection += g[i] * normed[i];
  });
  gradient = p.centred ? sum_of_warp(gradient) / size : 0;
  projection = sum_of_warp(projection) / size;
  for_each_column(p.n, [&](int column, int count) {
    Eight normed, g;
    load(normed, g, column, count);
#pragma unroll
    for (int i = 0; i < kEight; ++i) g[i] = (g[i] - gradient - normed[i] * projection) * rstd;
    add_row(g, p.residual, row, column, count);
    if (p.accumulate) add_row(g, p.grad_x, row, column, count);
    RowOf(p.grad_x, row).store(g, column, count);
  });
}

// grad_gamma = sum of grad_y normed, grad_beta = sum of grad_y, over a block's rows.
__device__ inline void norm_parameters(const NormProblem& p) {
  __shared__ float shared[kRowsAtOnce][kColumnsOfBlock];
  const RowsOfThread rows(p.m, p.n, p.rows_of_block);
  Eight of_gamma = {}, of_beta = {};
  for (int row = rows.first_row; row < rows.end_row; row += kRowsAtOnce) {
    Eight x, grad;
    RowOf(p.x, row).load(x, rows.column, rows.count);
    RowOf(p.grad_y, row).load(grad, rows.column, rows.count);
    const float mean = p.centred ? p.mean[row] : 0, rstd = p.rstd[row];
#pragma unroll
    for (int i = 0; i < kEight; ++i) of_gamma[i] += grad[i] * ((x[i] - mean) * rstd), of_beta[i] += grad[i];
  }
  float* const to = p.partial + rows.block_of_rows * 2 * p.stride;
  add_threads(of_gamma, shared, rows, to, p.n);
  add_threads(of_beta, shared, rows, to + p.stride, p.n);
}

}  // namespace polyhead::cuda
