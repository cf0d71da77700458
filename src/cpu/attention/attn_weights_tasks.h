// The general path where weights or column sums are asked for: the same tiles, in tasks that own what they add up.
#pragma once

#include "contract/kernel.h"
#include "contract/sequences.h"
#include "cpu/attention/functions.h"

namespace polyhead::cpu {

MemorySize weights_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads);
void weights_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                     const Sequences& sequences, const Run& run);

}  // namespace polyhead::cpu
