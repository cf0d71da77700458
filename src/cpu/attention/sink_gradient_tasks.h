// The gradient of the sinks: a sum over the rows of a head, from L, O and their gradients alone.
#pragma once

#include "contract/kernel.h"
#include "contract/sequences.h"

namespace polyhead::cpu {

void sink_gradients_backward(const AttentionDesc& desc, const BackwardArgs& args, const Sequences& sequences,
                             const Run& run);

}  // namespace polyhead::cpu
