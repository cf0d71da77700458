// polyhead::merge_forward and merge_backward.
#pragma once

#include <span>

#include "operator_kernel.h"

namespace polyhead::torch_ops {

std::span<const OperatorKernel> merge_kernels();  // take lists

}  // namespace polyhead::torch_ops
