// Products of a warp's rows, sixteen or more, whose sums lie in fragments C (mma.cuh): on tensor cores, or in float32 with FFMA, since a
// tensor core would round its operands.
#pragma once

#include "cuda/lane_rows.cuh"
#include "cuda/tile.cuh"

namespace polyhead::cuda {

// Four floats of a row, of a piece of a tile.
template <int kD, int kRows>
__device__ inline float4 four(const Tile<Float32, kD, kRows>& tile, int row, int swizzled) {
  return reinterpret_cast<const float4*>(tile.elements + row * kD)[swizzled];
}

// C [16 kSixteens, 8 kBlocks] += A B^T of as many rows of A and of B, from rows a and b on, multiples of 8. Columns from
// `columns` on are 0; it may be above kD, and below 0.
template <class T, int kD, int kSixteens, int kBlocks, int kRowsA, int kRowsB>
__device__ inline void multiply_rows(float (&C)[kSixteens][kBlocks][4], Tile<T, kD, kRowsA>& A, int a,
                                     Tile<T, kD, kRowsB>& B, int b, int columns, int lane) {
  if constexpr (T::kOnTensorCores) {
    const unsigned of_a = A.address(a + lane % 16, lane / 16);
    const unsigned of_b = B.address(b + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll(kD > 128 ? 1 : kD / 16)  // sums of many columns leave no registers
    for (int k = 0; k < kD / 16; ++k) {
      unsigned rows[kSixteens][4];
#pragma unroll
      for (int s = 0; s < kSixteens; ++s) load_matrices(rows[s], (of_a ^ 32 * k) + 16 * s * A.kRowBytes);
#pragma unroll
      for (int n = 0; n < kBlocks; n += 2) {
        unsigned x[4];
        load_matrices(x, (of_b ^ 32 * k) + n * 8 * B.kRowBytes);
#pragma unroll
        for (int s = 0; s < kSixteens; ++s) {
          multiply_add<T>(C[s][n], rows[s], x[0], x[1]);
          multiply_add<T>(C[s][n + 1], rows[s], x[2], x[3]);
        }
      }
    }
  } else {
    const int g = lane / 4, t = lane % 4, end = columns < kD ? columns : kD;
#pragma unroll 1
    for (int k = 0; 4 * k < end; ++k) {
      float4 rows[2 * kSixteens];
#pragma unroll
      for (int r = 0; r < 2 * kSixteens; ++r) rows[r] = four(A, a + g + 8 * r, k ^ g);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float4 x = four(B, b + n * 8 + 2 * t + e, k ^ (2 * t + e));
#pragma unroll
          for (int r = 0; r < 2 * kSixteens; ++r) {
            float& sum = C[r / 2][n][r % 2 * 2 + e];
            sum = fmaf(rows[r].w, x.w, fmaf(rows[r].z, x.z, fmaf(rows[r].y, x.y, fmaf(rows[r].x, x.x, sum))));
          }
        }
      }
    }
  }
}

template <class T, int kD, int kBlocks>
__device__ inline void multiply_rows(float (&C)[kBlocks][4], Tile<T, kD>& A, int a, Tile<T, kD>& B, int b, int columns,
                                     int lane) {
  multiply_rows(reinterpret_cast<float(&)[1][kBlocks][4]>(C), A, a, B, b, columns, lane);
}

// C [16 kSixteens, kD] += weights [16 kSixteens, 8 kBlocks] B of 8 kBlocks rows of B from row b on, a multiple of 8. Weights
// come back as they were.
template <int kD, int kRows, int kSixteens, int kBlocks>
__device__ inline void multiply_weights(float (&C)[kSixteens][kD / 8][4], float (&weights)[kSixteens][kBlocks][4],
                                        const Tile<Float32, kD, kRows>& B, int b, int lane) {
  const int t = lane % 4;
#pragma unroll 1
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll(kSixteens > 1 ? 4 : 8)  // more would leave no registers to add_not_finite
    for (int j = 0; j < 8; ++j) {
      const int from = (lane & ~3) + j / 2;
      float of_row[2 * kSixteens];
#pragma unroll
      for (int r = 0; r < 2 * kSixteens; ++r) {
        of_row[r] = __shfl_sync(kAllLanes, weights[r / 2][0][r % 2 * 2 + j % 2], from);
      }
      // Piece 2 c + t / 2 of the row lies at (2 c + t / 2) ^ j, which is that of c alone and that of t.
      const auto* row =
          reinterpret_cast<const float2*>(B.elements + (b + n * 8 + j) * kD) + ((t / 2) ^ (j & 1)) * 2 + t % 2;
#pragma unroll
      for (int c = 0; c < kD / 8; ++c) {
        const float2 x = row[((2 * c) ^ (j & 6)) * 2];
#pragma unroll
        for (int r = 0; r < 2 * kSixteens; ++r) {
          float(&sums)[4] = C[r / 2][c];
          sums[r % 2 * 2] = fmaf(of_row[r], x.x, sums[r % 2 * 2]);
          sums[r % 2 * 2 + 1] = fmaf(of_row[r], x.y, sums[r % 2 * 2 + 1]);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kSixteens; ++s) rotate(weights[s]);
  }
}
template <int kD, int kBlocks>
__device__ inline void multiply_weights(float (&C)[kD / 8][4], float (&weights)[kBlocks][4], const Tile<Float32, kD>& B,
                                        int b, int lane) {
  multiply_weights(reinterpret_cast<float(&)[1][kD / 8][4]>(C), reinterpret_cast<float(&)[1][kBlocks][4]>(weights), B,
                   b, lane);
}

// C += weights B with the infinities and NaNs of B alone, for the rows that see them: tensor cores would multiply them by the
// 0 of a row that does not. What is added is +-inf, or NaN, also where a weight underflowed to 0. Row j of `count` of B is
// row_at(j) of `rows` (number_at<T>); C has its columns from first_column on. sees(r, j): of a lane's two rows.
template <class T, bool kSigned, int kColumnBlocks, int kBlocks, class Source, class RowAt, class Sees>
__device__ inline void add_not_finite(float (&C)[kColumnBlocks][4], const float (&weights)[kBlocks][4],
                                      const Source& rows, int64_t count, int first_column, int columns, int lane,
                                      const RowAt& row_at, const Sees& sees) {
  const Signs<kSigned> signs(weights, lane);
#pragma unroll 1
  for (int j = 0; j < 8 * kBlocks && j < count; ++j) {
    const auto row = row_at(j);
    if (!is_there(row)) continue;
#pragma unroll 1
    for (int of_lane = lane % 4 * 2; of_lane < 8 * kColumnBlocks; of_lane += 8) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = first_column + of_lane + e % 2;
        if (!sees(e / 2, j) || column >= columns) continue;
        const float x = number_at<T>(rows, row, column);
        if (x - x != 0) C[0][e] += signs.times(e / 2, j, x);
      }
      rotate(C);
    }
  }
}

}  // namespace polyhead::cuda
