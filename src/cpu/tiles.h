// The general path: any problem, tile by tile. isa_functions.h's forward_tiles does the work; here it is cut into tasks.
#pragma once

#include "attention/kernel.h"
#include "cpu/isa_functions.h"

namespace polyhead::cpu {

size_t tiles_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads);
void tiles_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                   Executor& executor);

}  // namespace polyhead::cpu
