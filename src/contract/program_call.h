// A program in a call of attention: what is known of it before it runs, and whether its indices stay within its tensors.
#pragma once

#include "contract/sequences.h"
#include "program/call.h"

namespace polyhead {

// code is null where the desc has no program.
program::Call program_call(const AttentionDesc& desc, const ForwardArgs& args);

// What causal, windows, sinks and lengths show of all pairs of a region, which is not empty: kSome is always right.
program::Seen seen_by_band(const Band& band, const Sequence& s, const program::Range& q, const program::Range& k);

// Of every pair that is seen. Indices that depend on the score are not looked at: kernels keep them within the tensor.
Status check_program_indices(const AttentionDesc& desc, const ForwardArgs& args, const Sequences& sequences);

}  // namespace polyhead
