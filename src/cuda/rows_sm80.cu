// The kernels of rows.cuh.
#include "cuda/linear_launch.h"
#include "cuda/rows.cuh"

namespace polyhead::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) pointwise_kernel(const __grid_constant__ PointwiseProblem problem) {
  pointwise(problem);
}
__global__ void __launch_bounds__(kThreads) merge_sums_kernel(const __grid_constant__ MergeProblem problem) {
  merge(problem);
}
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(const __grid_constant__ CopyProblem problem) {
  copy(problem);
}
__global__ void __launch_bounds__(kThreads) sum_heads_kernel(const __grid_constant__ HeadsProblem problem) {
  sum_heads(problem);
}

}  // namespace

cudaError_t launch_pointwise(const PointwiseProblem& p, cudaStream_t stream) {
  const unsigned blocks = pieces_of(p.m, p.rows_of_block) * pieces_of(p.n, kColumnsOfBlock);
  pointwise_kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_merge(const MergeProblem& p, cudaStream_t stream) {
  merge_sums_kernel<<<pieces_of(p.n, kThreads), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_sum_heads(const HeadsProblem& p, cudaStream_t stream) {
  sum_heads_kernel<<<pieces_of(int64_t{p.m} * p.n, kThreads), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_copy(const CopyProblem& p, cudaStream_t stream) {
  copy_rows_kernel<<<pieces_of(p.m, kRowsAtOnce) * pieces_of(p.n, kColumnsOfBlock), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace polyhead::cuda
