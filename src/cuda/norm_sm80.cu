// The kernels of norm.cuh.
#include "cuda/linear_launch.h"
#include "cuda/norm.cuh"

namespace polyhead::cuda {
namespace {

constexpr int kWarps = kThreads / 32;

__device__ int row_of_warp() { return static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32; }

__global__ void __launch_bounds__(kThreads) norm_forward_kernel(const __grid_constant__ NormProblem problem) {
  if (row_of_warp() < problem.m) norm_forward(problem, row_of_warp());
}
__global__ void __launch_bounds__(kThreads) norm_backward_kernel(const __grid_constant__ NormProblem problem) {
  if (row_of_warp() < problem.m) norm_backward(problem, row_of_warp());
}
__global__ void __launch_bounds__(kThreads) norm_parameters_kernel(const __grid_constant__ NormProblem problem) {
  norm_parameters(problem);
}

}  // namespace

cudaError_t launch_norm_forward(const NormProblem& p, cudaStream_t stream) {
  norm_forward_kernel<<<pieces_of(p.m, kWarps), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_norm_backward(const NormProblem& p, cudaStream_t stream) {
  norm_backward_kernel<<<pieces_of(p.m, kWarps), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_norm_parameters(const NormProblem& p, cudaStream_t stream) {
  const unsigned blocks = pieces_of(p.m, p.rows_of_block) * pieces_of(p.n, kColumnsOfBlock);
  norm_parameters_kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace polyhead::cuda
