// What becomes of a warp's sums of a gradient.
#pragma once

#include "cuda/band.cuh"

namespace polyhead::cuda {

// The gradient of one head of a sequence, which begins at row `first` and has `end` rows, and what its sums are multiplied by.
struct GradientRows {
  const Rows& rows;
  int b, h;
  int64_t first, end;
  int columns;
  float factor;
  bool accumulate;

  // Of a lane's two rows, columns from first_column on. One that takes part in no visible pair gets 0, or keeps what is there.
  template <int kBlocks>
  __device__ void store(float (&sum)[kBlocks][4], const int64_t (&own)[2], const bool (&unseen)[2], int first_column,
                        int lane) const {
    if (rows.data == nullptr) return;
#pragma unroll 1
    for (int of_lane = lane % 4 * 2; of_lane < 8 * kBlocks; of_lane += 8) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        store(sum[0][e], own[e / 2], unseen[e / 2], first_column + of_lane + e % 2);
      }
      rotate(sum);
    }
  }

  // Of one of its rows.
  __device__ void store(float sum, int64_t row, bool unseen, int column) const {
    if (row >= end || column >= columns || (unseen && accumulate)) return;
    const int64_t at = b * rows.batch + h * rows.head + (first + row) * rows.row + column * rows.column;
    float value = unseen ? 0 : factor * sum + 0.f;  // -0 + 0 is +0
    if (accumulate) value += load_number(rows.data, rows.number, at);
    store_number(rows.data, rows.number, at, value);
  }
};

// Of a pass over queries, or over keys: of values, or of what scores are made of. Of head h of sequence b.
template <bool kKeys>
__device__ inline GradientRows gradient_rows(const BackwardProblem& p, const Band& band, int b, int h, bool values) {
  return {!kKeys   ? p.grad_query
          : values ? p.grad_value
                   : p.grad_key,
          b,
          h,
          kKeys ? band.first_k : band.first_q,
          kKeys ? band.rows_k : band.rows_q,
          values ? p.head_dim_v : p.head_dim,
          values ? 1 : p.scale,
          p.accumulate};
}

}  // namespace polyhead::cuda
