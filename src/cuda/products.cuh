// Products of a warp's 16 rows, whose sums lie in fragments C (mma.cuh): on tensor cores, or in float32 with FFMA, since a
// tensor core would round its operands.
#pragma once

#include "cuda/lane_rows.cuh"
#include "cuda/tile.cuh"

namespace polyhead::cuda {

// Four floats of a row, of a piece of Tile<Float32, kD>.
template <int kD>
__device__ inline float4 four(const Tile<Float32, kD>& tile, int row, int swizzled) {
  return reinterpret_cast<const float4*>(tile.elements + row * kD)[swizzled];
}

// C [16, 8 kBlocks] += A B^T of 16 rows of A and 8 kBlocks of B, from rows a and b on, multiples of 8. Columns from
// `columns` on are 0; it may be above kD, and below 0.
template <class T, int kD, int kBlocks>
__device__ inline void multiply_rows(float (&C)[kBlocks][4], Tile<T, kD>& A, int a, Tile<T, kD>& B, int b, int columns,
                                     int lane) {
  if constexpr (T::kOnTensorCores) {
#pragma unroll(kD > 128 ? 1 : kD / 16)  // sums of many columns leave no registers
    for (int k = 0; k < kD / 16; ++k) {
      unsigned rows[4];
      load_matrices(rows, A.piece(a + lane % 16, 2 * k + lane / 16));
#pragma unroll
      for (int n = 0; n < kBlocks; n += 2) {
        unsigned x[4];
        load_matrices(x, B.piece(b + n * 8 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
        multiply_add<T>(C[n], rows, x[0], x[1]);
        multiply_add<T>(C[n + 1], rows, x[2], x[3]);
      }
    }
  } else {
    const int g = lane / 4, t = lane % 4, end = columns < kD ? columns : kD;
#pragma unroll 1
    for (int k = 0; 4 * k < end; ++k) {
      const float4 rows[2] = {four(A, a + g, k ^ g), four(A, a + g + 8, k ^ g)};
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float4 x = four(B, b + n * 8 + 2 * t + e, k ^ (2 * t + e));
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float& sum = C[n][2 * r + e];
            sum = fmaf(rows[r].w, x.w, fmaf(rows[r].z, x.z, fmaf(rows[r].y, x.y, fmaf(rows[r].x, x.x, sum))));
          }
        }
      }
    }
  }
}

// C [16, kD] += weights [16, 8 kBlocks] B of 8 kBlocks rows of B from row b on, a multiple of 8. Weights come back as
// they were.
template <int kD, int kBlocks>
__device__ inline void multiply_weights(float (&C)[kD / 8][4], float (&weights)[kBlocks][4], const Tile<Float32, kD>& B,
                                        int b, int lane) {
  const int t = lane % 4;
#pragma unroll 1
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int from = (lane & ~3) + j / 2;
      const float of_row[2] = {__shfl_sync(kAllLanes, weights[0][j % 2], from),
                               __shfl_sync(kAllLanes, weights[0][2 + j % 2], from)};
      // Piece 2 c + t / 2 of the row lies at (2 c + t / 2) ^ j, which is that of c alone and that of t.
      const auto* row =
          reinterpret_cast<const float2*>(B.elements + (b + n * 8 + j) * kD) + ((t / 2) ^ (j & 1)) * 2 + t % 2;
#pragma unroll
      for (int c = 0; c < kD / 8; ++c) {
        const float2 x = row[((2 * c) ^ (j & 6)) * 2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          C[c][2 * r] = fmaf(of_row[r], x.x, C[c][2 * r]);
          C[c][2 * r + 1] = fmaf(of_row[r], x.y, C[c][2 * r + 1]);
        }
      }
    }
    rotate(weights);
  }
}

}  // namespace polyhead::cuda
