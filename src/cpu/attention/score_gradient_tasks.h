// Gradients of bias and ALiBi slopes, cut into tasks that each own elements of them.
#pragma once

#include "contract/kernel.h"
#include "contract/sequences.h"
#include "cpu/attention/functions.h"

namespace polyhead::cpu {

MemorySize score_gradients_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads);
void score_gradients_backward(const IsaFunctions& functions, const AttentionDesc& desc, const BackwardArgs& args,
                              const Sequences& sequences, const Run& run);

}  // namespace polyhead::cpu
