#include "cuda/gemm_launch.cuh"

namespace polyhead::cuda {

template cudaError_t launch_gemm<Float16>(const GemmProblem& problem, GemmSize size, cudaStream_t stream);

}  // namespace polyhead::cuda
