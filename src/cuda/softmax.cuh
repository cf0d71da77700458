// The softmax of rows whose scores come a tile at a time (FlashAttention-2, algorithm 1 of arXiv:2307.08691), in fragments
// C of 16 rows (mma.cuh). A lane has two of them, of which elements 2 r and 2 r + 1 belong to row r.
#pragma once

#include <cmath>

#include "cuda/lane_rows.cuh"
#include "cuda/mma.cuh"

namespace polyhead::cuda {

// Of one of a lane's rows.
struct SoftmaxRow {
  float m = -INFINITY;  // the largest score so far
  float l = 0;          // sum of exp(S - m), this lane's part
  float l_rounded = 0;  // the same of the weights as they multiply V; not counted in float32, where that is l
};

// Not one operation with the sum that it goes into, which compilers make of it here and not there: rows have the same bits by
// every kernel.
__device__ inline float rounded_product(float x, float y) { return __fmul_rn(x, y); }

// The largest of row r, or m where that is larger.
template <int kBlocks>
__device__ inline float largest_score(const float (&S)[kBlocks][4], int r, float m) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) m = fmaxf(m, fmaxf(S[n][2 * r], S[n][2 * r + 1]));
  return max_of_row(m);
}
// What is taken off the scores of a row whose largest is m: -inf - -inf is NaN.
__device__ inline float finite_m(float m) { return m == -INFINITY ? 0 : m; }

// l <- l alpha + sum P
template <int kBlocks>
__device__ inline void add_weights(const float (&P)[kBlocks][4], const float (&alpha)[2], SoftmaxRow& row0,
                                   SoftmaxRow& row1) {
  float sums[2];
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[e / 2] = n == 0 && e % 2 == 0 ? P[n][e] : sums[e / 2] + P[n][e];
  }
  row0.l = rounded_product(row0.l, alpha[0]) + sums[0];
  row1.l = rounded_product(row1.l, alpha[1]) + sums[1];
}

// S <- P = exp(S - m), l <- l alpha + sum P, alpha = exp(m_old - m)
template <class T, int kBlocks>
__device__ inline void softmax_step(float (&S)[kBlocks][4], SoftmaxRow& row0, SoftmaxRow& row1, float (&alpha)[2]) {
  float m[2];  // of this step
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    SoftmaxRow& row = r == 0 ? row0 : row1;
    const float largest = largest_score(S, r, row.m);
    m[r] = finite_m(largest);
    alpha[r] = exponential<T>(row.m - m[r]);
    row.m = largest;
    row.l_rounded = rounded_product(row.l_rounded, alpha[r]);
  }
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) S[n][e] = exponential<T>(S[n][e] - m[e / 2]);
  }
  add_weights(S, alpha, row0, row1);
}

// The same of scores that are S times `scale`, which is above 0, and m the largest S: what exp2 takes is one operation, where m is not
// far from 0, as it is in rows with a bias of -1e9. l_rounded
// is left to who multiplies the weights.
template <class T, int kBlocks>
__device__ inline void softmax_of_products(float (&S)[kBlocks][4], SoftmaxRow& row0, SoftmaxRow& row1,
                                           float (&alpha)[2], float scale) {
  static_assert(T::kOnTensorCores);
  const float factor = scale * kLog2E;
  float m[2], power[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    SoftmaxRow& row = r == 0 ? row0 : row1;
    const float largest = largest_score(S, r, row.m);
    m[r] = finite_m(largest);
    power[r] = m[r] * factor;
    alpha[r] = exp2_approx((row.m - m[r]) * factor);
    row.m = largest;
  }
  constexpr float kFar = 1024;  // half an ulp beyond would show in weights
  const bool far[2] = {!(fabsf(power[0]) < kFar), !(fabsf(power[1]) < kFar)};
  if (__any_sync(kAllLanes, far[0] || far[1])) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // other rows have the bits that they have without such a row beside them
        const float of_far = (S[n][e] - m[e / 2]) * factor;
        S[n][e] = exp2_approx(far[e / 2] ? of_far : fmaf(S[n][e], factor, -power[e / 2]));
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) S[n][e] = exp2_approx(fmaf(S[n][e], factor, -power[e / 2]));
    }
  }
  add_weights(S, alpha, row0, row1);
}

template <int kBlocks>
__device__ inline void multiply_rows_of(float (&O)[kBlocks][4], const float (&factors)[2]) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) O[n][e] *= factors[e / 2];
  }
}

// The same with softmax_step's factors, which are 1 in most steps over many keys: no row of the warp has a larger score then.
template <int kBlocks>
__device__ inline void rescale_rows_of(float (&O)[kBlocks][4], const float (&alpha)[2]) {
  if (__any_sync(kAllLanes, alpha[0] != 1 || alpha[1] != 1)) multiply_rows_of(O, alpha);
}

// Sixteen columns of P from column 16 k on as a fragment A, and of float16 what its rounding left.
template <class T, int kBlocks>
__device__ inline void round_weights(const float (&P)[kBlocks][4], int k, unsigned (&rounded)[4], unsigned (&rest)[4]) {
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const float low = P[2 * k + a / 2][a % 2 * 2], high = P[2 * k + a / 2][a % 2 * 2 + 1];
    rounded[a] = packed<T>(low, high);
    if constexpr (T::kRestOfWeights) {
      rest[a] = packed<T>(low - low_half<T>(rounded[a]), high - high_half<T>(rounded[a]));
    }
  }
}

// The same, and l_rounded with this lane's part of their sums.
template <class T, int kBlocks>
__device__ inline void round_weights(const float (&P)[kBlocks][4], int k, SoftmaxRow& row0, SoftmaxRow& row1,
                                     unsigned (&rounded)[4], unsigned (&rest)[4]) {
  round_weights<T>(P, k, rounded, rest);
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const float low = P[2 * k + a / 2][a % 2 * 2], high = P[2 * k + a / 2][a % 2 * 2 + 1];
    (a % 2 == 0 ? row0 : row1).l_rounded +=
        T::kRestOfWeights ? low + high : low_half<T>(rounded[a]) + high_half<T>(rounded[a]);
  }
}

}  // namespace polyhead::cuda
