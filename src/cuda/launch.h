// The kernels, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/problem.h"

namespace polyhead::cuda {

// Kernels that were compiled for a desc's program, in the place of those that are here; null: of none.
struct ProgramKernels {
  const void* forward = nullptr;
  const void* backward[4] = {};  // by pass
  const void* pair_sums = nullptr;
  const void* capture_gradients = nullptr;
};

// A kernel of any of them, with `bytes` of shared memory, and blocks of so many threads.
template <class... Args>
cudaError_t launch_block(const void* kernel, dim3 grid, unsigned threads, int bytes, cudaStream_t stream,
                         const Args&... args) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  return cudaLaunchKernel(kernel, grid, dim3(threads), pointers, static_cast<size_t>(bytes), stream);
}
template <class... Args>
cudaError_t launch(const void* kernel, dim3 grid, int bytes, cudaStream_t stream, const Args&... args) {
  return launch_block(kernel, grid, kBlockThreads, bytes, stream, args...);
}

// Put the kernels on the stream. At least one query, head and sequence; their blocks fit in a grid (2^31 - 1).
cudaError_t launch_forward(const Problem& problem, const ProgramKernels& of_program, cudaStream_t stream);
cudaError_t launch_forward_groups(const Problem& problem, cudaStream_t stream);           // of launch_forward, on 9.0
cudaError_t launch_backward_groups(const BackwardProblem& problem, cudaStream_t stream);  // likewise
cudaError_t launch_forward_stored(const StoredProblem& problem, const ProgramKernels& of_program, cudaStream_t stream);
cudaError_t launch_backward(const BackwardProblem& problem, const ProgramKernels& of_program, cudaStream_t stream);
// Behind those: its sums, and those of captures.
cudaError_t launch_pair_sums(const BackwardProblem& problem, const ProgramKernels& of_program, cudaStream_t stream);
cudaError_t launch_stored_weights(const StoredWeightsProblem& problem, const ProgramKernels& of_program,
                                  cudaStream_t stream);
cudaError_t launch_capture_gradients(const BackwardProblem& problem, CaptureSums sums, const ProgramKernels& of_program,
                                     cudaStream_t stream);

}  // namespace polyhead::cuda
