// Rows of a matrix in fragments (mma.cuh): four lanes share a row; what stands for a whole row is read here.
#pragma once

#include <cmath>

#include "cuda/problem.h"

namespace polyhead::cuda {

constexpr unsigned kAllLanes = 0xffffffff;

// The others, keys or queries, that a row meets: from first to last, exclusive.
struct Range {
  int64_t first, last;
  __device__ bool holds(int64_t x) const { return first <= x && x < last; }
  __device__ bool empty() const { return first >= last; }
};

// Block n + 1 becomes block n, and `last` the last one. A loop that takes the first block each time has code for one
// alone, and registers need no index: for what is long and not in the inner loop.
template <int kBlocks>
__device__ inline void append(float (&blocks)[kBlocks][4], const float (&last)[4]) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) blocks[n][e] = n + 1 < kBlocks ? blocks[n + 1][e] : last[e];
  }
}
template <int kBlocks>
__device__ inline void rotate(float (&blocks)[kBlocks][4]) {
  append(blocks, {blocks[0][0], blocks[0][1], blocks[0][2], blocks[0][3]});
}

__device__ inline float max_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ inline float sum_of_row(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// A bit for each column of a lane's two rows, of which four lanes know theirs: holds(n, e) of block n.
struct RowBits {
  uint64_t rows[2] = {};

  template <int kBlocks, class Holds>
  __device__ static RowBits of(int lane, const Holds& holds) {
    RowBits bits;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const unsigned lanes = __ballot_sync(kAllLanes, holds(n, e)) >> (lane & ~3);
        for (int t = 0; t < 4; ++t)
          bits.rows[e / 2] |= static_cast<uint64_t>(lanes >> t & 1) << (n * 8 + 2 * t + e % 2);
      }
    }
    return bits;
  }
  __device__ bool hold(int r, int column) const { return rows[r] >> column & 1; }
};

// What factors make of an infinity or a NaN. kSigned: they may be below 0.
template <bool kSigned>
class Signs {
 public:
  template <int kBlocks>
  __device__ Signs(const float (&x)[kBlocks][4], int lane)
      : above(RowBits::of<kBlocks>(lane, [&](int n, int e) { return x[n][e] > 0; })) {
    if constexpr (kSigned) below = RowBits::of<kBlocks>(lane, [&](int n, int e) { return x[n][e] < 0; });
  }

  __device__ float times(int r, int column, float v) const {
    return above.hold(r, column) ? v : kSigned && below.hold(r, column) ? -v : NAN;
  }

 private:
  RowBits above, below;
};

__device__ inline float& statistic(const Statistic& x, int64_t b, int64_t h, int64_t i) {
  return x.data[b * x.batch + h * x.head + i * x.row];
}

}  // namespace polyhead::cuda
