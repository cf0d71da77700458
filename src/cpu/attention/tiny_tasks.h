// The path of tiny heads: several of them side by side. functions.h's tiny_heads does the work.
#pragma once

#include "contract/kernel.h"
#include "contract/sequences.h"
#include "cpu/attention/functions.h"

namespace polyhead::cpu {

// Whether this path computes `desc`: told by its shape and options alone, so that the batch changes no bit.
bool tiny_takes(const AttentionDesc& desc);

// O, L and weights; no column sums.
MemorySize tiny_workspace_bytes(const IsaFunctions& functions, int num_threads);
void tiny_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                  const Sequences& sequences, const Run& run);

MemorySize tiny_backward_workspace_bytes(const IsaFunctions& functions, int num_threads);
void tiny_backward(const IsaFunctions& functions, const AttentionDesc& desc, const BackwardArgs& args,
                   const Sequences& sequences, const Run& run);

}  // namespace polyhead::cpu
