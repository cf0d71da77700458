// The kernels of products, epilogues and norms, for the host. Each puts its work on the stream.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/decoding_problem.h"
#include "cuda/linear_problem.h"

namespace polyhead::cuda {

// The elements of numbers.cuh.
struct BFloat16;
struct Float16;
struct Float32;

// Of a block of threads, by the elements that are multiplied. kFew: all rows, which are no more than that, and no slices.
enum class GemmSize { kFew, kSmall, kLarge };
struct GemmTile {
  int rows, columns;
};
constexpr GemmTile gemm_tile(Number number, GemmSize size) {
  if (size == GemmSize::kFew) return {kFewRows, kFewColumns};
  const bool large = size == GemmSize::kLarge;
  if (number == Number::kFloat32) return large ? GemmTile{128, 64} : GemmTile{64, 32};
  return large ? GemmTile{128, 128} : GemmTile{64, 64};
}

// How many blocks take n rows, columns or elements, `size` each.
inline unsigned pieces_of(int64_t n, int64_t size) { return static_cast<unsigned>(n / size + (n % size != 0)); }

// `size`: of the tiles that row_tiles and column_tiles count. With kFew A's terms lie inside (Factor).
template <class T>
cudaError_t launch_gemm(const GemmProblem& problem, GemmSize size, cudaStream_t stream);

cudaError_t launch_pointwise(const PointwiseProblem& problem, cudaStream_t stream);
cudaError_t launch_merge(const MergeProblem& problem, cudaStream_t stream);
cudaError_t launch_sum_heads(const HeadsProblem& problem, cudaStream_t stream);
cudaError_t launch_copy(const CopyProblem& problem, cudaStream_t stream);
cudaError_t launch_append(const AppendProblem& problem, cudaStream_t stream);
cudaError_t launch_copy_tokens(const CopyTokensProblem& problem, cudaStream_t stream);
cudaError_t launch_read_tokens(const ReadTokensProblem& problem, cudaStream_t stream);
cudaError_t launch_step(const StepProblem& problem, cudaStream_t stream);
cudaError_t launch_norm_forward(const NormProblem& problem, cudaStream_t stream);
cudaError_t launch_norm_backward(const NormProblem& problem, cudaStream_t stream);    // grad_x
cudaError_t launch_norm_parameters(const NormProblem& problem, cudaStream_t stream);  // `partial`

}  // namespace polyhead::cuda
