// Rows of a matrix in fragments (mma.cuh): four lanes share a row; what stands for a whole row is read here.
#pragma once

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

__device__ inline float& statistic(const Statistic& x, int64_t b, int64_t h, int64_t i) {
  return x.data[b * x.batch + h * x.head + i * x.row];
}

}  // namespace polyhead::cuda
