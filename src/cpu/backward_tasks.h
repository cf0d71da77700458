// Gradients of query, key and value, cut into tasks: whole heads, or, where heads are few, chunks of their keys.
#pragma once

#include "attention/kernel.h"
#include "cpu/isa_functions.h"

namespace polyhead::cpu {

size_t gradients_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads);
void gradients_backward(const IsaFunctions& functions, const AttentionDesc& desc, const BackwardArgs& args,
                        Executor& executor);

}  // namespace polyhead::cpu
