// How a call's matrices are told to the kernels of products, epilogues and norms.
#pragma once

#include <cuda_runtime_api.h>

#include "contract/linear.h"
#include "cuda/linear_problem.h"

namespace polyhead::cuda {

// The sizes that are taken, or a sentence about one that is not.
Status check_sizes(int64_t m, int64_t n, int64_t k = 0);

cudaStream_t stream_of(const Run& run);

// What a launch gave, and, before it, whether a grid has so many blocks of threads.
Status launched(cudaError_t error);
Status check_grid(MemorySize blocks);

View view_of(const linear::Matrix& x);

// Of A [m, k], or of B's transpose [n, k].
Factor factor_of(const linear::Matrix& x);

// `rows`: of the output, or where there is none of the input, without having been joined.
Finish finish_of(const linear::Epilogue& epilogue, const linear::Axis& rows, const linear::Matrix& out,
                 bool accumulate);

}  // namespace polyhead::cuda
