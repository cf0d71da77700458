// Gradients of bias and ALiBi slopes, cut into tasks that each own elements of them.
#pragma once

#include "contract/kernel.h"
#include "cpu/attention/functions.h"

namespace polyhead::cpu {

size_t score_gradients_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads);
void score_gradients_backward(const IsaFunctions& functions, const AttentionDesc& desc, const BackwardArgs& args,
                              Executor& executor);

}  // namespace polyhead::cpu
