// The kernels of descs with programs: compiled when they are first needed, and kept until the process ends, by the program's
// text, the tile's type and columns, and the GPU's compute capability.
#pragma once

#include "cuda/launch.h"
#include "polyhead/attention.h"

namespace polyhead::cuda {

// Of forward, and of what it returns of weights; nothing without a program.
Result<ProgramKernels> forward_kernels(const AttentionDesc& desc, Number elements);

// Of what `problem` and `captures` want of the gradients.
Result<ProgramKernels> backward_kernels(const AttentionDesc& desc, const BackwardProblem& problem,
                                        const CaptureSums& captures);

}  // namespace polyhead::cuda
