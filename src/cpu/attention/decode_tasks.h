// The path of few queries: chunks of keys as tasks, then what they found merged. functions.h's decode_chunk and
// decode_merge do the work.
#pragma once

#include "contract/kernel.h"
#include "contract/sequences.h"
#include "cpu/attention/functions.h"

namespace polyhead::cpu {

constexpr int64_t kMaxDecodeQueries = 12;  // more fill the lanes of the general path

// Whether this path computes `desc`: told by its shape alone, so that the batch and the threads change no bit.
bool decode_takes(const AttentionDesc& desc);

MemorySize decode_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads);
void decode_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                    const Sequences& sequences, const Run& run);

}  // namespace polyhead::cpu
