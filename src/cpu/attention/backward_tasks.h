// Gradients of query, key and value, and of what a program captures, cut into tasks: whole heads, or, where heads are few,
// chunks of their keys.
#pragma once

#include "contract/kernel.h"
#include "contract/sequences.h"
#include "cpu/attention/functions.h"

namespace polyhead::cpu {

// Whether gradients_backward writes the bias's gradient too: where each of its elements belongs to one query and key of one
// head, of one sequence or of all, whose dS are then added in order. Else score_gradients_backward has a pass for it.
bool gives_bias(const AttentionDesc& desc, const BackwardArgs& args);

MemorySize gradients_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads);
void gradients_backward(const IsaFunctions& functions, const AttentionDesc& desc, const BackwardArgs& args,
                        const Sequences& sequences, const Run& run);

}  // namespace polyhead::cpu
