// The kernels of decoding.cuh.
#include "cuda/decoding.cuh"
#include "cuda/linear_launch.h"

namespace polyhead::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendProblem problem) {
  append(problem);
}
__global__ void __launch_bounds__(kThreads) step_kernel(const __grid_constant__ StepProblem problem) {
  stand_at_step(problem);
}

}  // namespace

cudaError_t launch_append(const AppendProblem& p, cudaStream_t stream) {
  append_kernel<<<pieces_of(p.batch * p.time * (p.heads + 2 * p.heads_kv), kWarps), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_step(const StepProblem& p, cudaStream_t stream) {
  step_kernel<<<pieces_of(p.batch, kThreads), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace polyhead::cuda
