// The norm of a block: its tensors checked, its calls filled in.
#pragma once

#include "attention/checks_operands.h"
#include "contract/linear.h"
#include "polyhead/block.h"

namespace polyhead {

Status check_norm_desc(const NormDesc& desc);

// gamma and beta, or their gradients: each as the desc asks for; gradients may be left out.
Status add_norm_weights(Operands& operands, Role role, const NormDesc& desc, const NormWeights& weights, int64_t size,
                        DType dtype);

// What norm_forward and norm_backward are told of a desc and its weights.
linear::NormForwardArgs norm_forward_args(const NormDesc& desc, const NormWeights& weights);
linear::NormBackwardArgs norm_backward_args(const NormDesc& desc, const NormWeights& weights);

}  // namespace polyhead
