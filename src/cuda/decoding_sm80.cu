// The kernels of decoding.cuh and cached_tokens.cuh.
#include "cuda/cached_tokens.cuh"
#include "cuda/decoding.cuh"
#include "cuda/launch.h"
#include "cuda/linear_launch.h"

namespace polyhead::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendProblem problem) {
  append(problem);
}
__global__ void __launch_bounds__(kThreads) copy_tokens_kernel(const __grid_constant__ CopyTokensProblem problem) {
  copy_tokens(problem, dynamic_shared<CopiedUnits>());
}
__global__ void __launch_bounds__(kThreads) read_tokens_kernel(const __grid_constant__ ReadTokensProblem problem) {
  read_tokens(problem);
}
__global__ void __launch_bounds__(kThreads) step_kernel(const __grid_constant__ StepProblem problem) {
  stand_at_step(problem);
}

}  // namespace

cudaError_t launch_append(const AppendProblem& p, cudaStream_t stream) {
  append_kernel<<<pieces_of(p.batch * p.time * (p.heads + 2 * p.heads_kv), kWarps), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_copy_tokens(const CopyTokensProblem& p, cudaStream_t stream) {
  return launch(reinterpret_cast<const void*>(copy_tokens_kernel), dim3(p.blocks), p.shared_bytes, stream, p);
}

cudaError_t launch_read_tokens(const ReadTokensProblem& p, cudaStream_t stream) {
  read_tokens_kernel<<<pieces_of(p.tokens * 2 * p.heads_kv, kWarps), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_step(const StepProblem& p, cudaStream_t stream) {
  step_kernel<<<pieces_of(p.batch, kThreads), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace polyhead::cuda
