// What backward begins with: delta = sum_c dO O - dL of each row of queries.
#pragma once

#include "cuda/lane_rows.cuh"
#include "cuda/numbers.cuh"

namespace polyhead::cuda {

constexpr int kDeltaLanes = 16, kDeltaColumns = 8;  // half a warp has a row, a lane so many of its columns at a time

// Columns c to c + 7 of the row that begins at element `row`: zeros from `columns` on. T: of what lies in pieces.
template <class T>
__device__ inline void load_columns(float (&x)[kDeltaColumns], const Rows& rows, int64_t row, int c, int columns) {
  if constexpr (T::kOnTensorCores) {
    if (rows.in_pieces && rows.number != Number::kFloat32) {
      const uint4 piece = *reinterpret_cast<const uint4*>(static_cast<const T*>(rows.data) + row + c);
      const unsigned words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) x[2 * n] = low_half<T>(words[n]), x[2 * n + 1] = high_half<T>(words[n]);
      return;
    }
  }
#pragma unroll
  for (int n = 0; n < kDeltaColumns; ++n) {
    x[n] = c + n < columns ? load_number(rows.data, rows.number, row + (c + n) * rows.column) : 0;
  }
}

// In the same order however the matrices lie.
template <class T>
__device__ inline float delta_of(const BackwardProblem& p, int64_t grad_out, int64_t out, int lane) {
  float sum = 0;
  for (int c = lane * kDeltaColumns; c < p.head_dim_v; c += kDeltaLanes * kDeltaColumns) {
    float x[kDeltaColumns], y[kDeltaColumns];
    load_columns<T>(x, p.grad_out, grad_out, c, p.head_dim_v);
    load_columns<T>(y, p.out, out, c, p.head_dim_v);
#pragma unroll
    for (int n = 0; n < kDeltaColumns; ++n) sum = fmaf(x[n], y[n], sum);
  }
#pragma unroll
  for (int lanes = kDeltaLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
  return sum;
}

// Of kBlockRows rows of a head.
template <class T>
__device__ void deltas(const BackwardProblem& p) {
  constexpr int kStep = kBlockThreads / kDeltaLanes;
  const auto heads = static_cast<unsigned>((p.packed ? 1 : p.batch) * p.heads), tile = blockIdx.x / heads,
             index = blockIdx.x - tile * heads;
  const unsigned b = index / static_cast<unsigned>(p.heads), h = index - b * static_cast<unsigned>(p.heads);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kDeltaLanes;
#pragma unroll 4
  for (int n = thread / kDeltaLanes; n < kBlockRows; n += kStep) {
    const int64_t i = int64_t{tile} * kBlockRows + n, last = p.seqlen_q - 1;
    float sum = 0;
    if (p.given_delta.data == nullptr) {
      const auto row_of = [&](const Rows& x) { return b * x.batch + h * x.head + (i < last ? i : last) * x.row; };
      sum = delta_of<T>(p, row_of(p.grad_out), row_of(p.out), lane);
    }
    if (i > last || lane != 0) continue;
    if (p.given_delta.data != nullptr) sum = statistic(p.given_delta, b, h, i);
    if (p.grad_logsumexp.data != nullptr) sum -= statistic(p.grad_logsumexp, b, h, i);
    statistic(p.delta, b, h, i) = sum;
  }
}

}  // namespace polyhead::cuda
