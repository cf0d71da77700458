// Packed sequences: those of few queries by chunks of keys, all others by tiles, in one queue.
#pragma once

#include "contract/kernel.h"
#include "contract/sequences.h"
#include "cpu/attention/functions.h"

namespace polyhead::cpu {

MemorySize packed_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads);
void packed_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                    const Sequences& sequences, const Run& run);

}  // namespace polyhead::cpu
