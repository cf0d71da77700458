// The general path: any problem, tile by tile. functions.h's forward_tiles does the work; here it is cut into tasks.
#pragma once

#include "contract/kernel.h"
#include "contract/sequences.h"
#include "cpu/attention/functions.h"

namespace polyhead::cpu {

MemorySize tiles_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads);
void tiles_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                   const Sequences& sequences, const Run& run);

}  // namespace polyhead::cpu
