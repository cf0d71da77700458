// polyhead::attention_block_forward, feed_forward_block_forward, and their backward operators.
#pragma once

#include <span>

#include "operator_kernel.h"

namespace polyhead::torch_ops {

std::span<const OperatorKernel> block_kernels();

}  // namespace polyhead::torch_ops
