// Rows of a matrix in fragments (mma.cuh): four lanes share a row; what stands for a whole row is read here.
#pragma once

#include "cuda/problem.h"

namespace polyhead::cuda {

constexpr float kLog2E = 1.44269504f;
constexpr unsigned kAllLanes = 0xffffffff;

// The others, keys or queries, that a row meets: from first to last, exclusive.
struct Range {
  int64_t first, last;
  __device__ bool holds(int64_t x) const { return first <= x && x < last; }
  __device__ bool empty() const { return first >= last; }
};

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
