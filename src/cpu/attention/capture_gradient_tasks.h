// Gradients of what a program captures: a pass of its own over the scores.
#pragma once

#include "contract/kernel.h"
#include "contract/sequences.h"
#include "cpu/attention/functions.h"

namespace polyhead::cpu {

MemorySize capture_gradients_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads);

// Those that `args` ask for, if any.
void capture_gradients_backward(const IsaFunctions& functions, const AttentionDesc& desc, const BackwardArgs& args,
                                const Sequences& sequences, const Run& run);

}  // namespace polyhead::cpu
