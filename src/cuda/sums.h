// How sums over pairs are cut into blocks of threads, and the memory that they need.
#pragma once

#include "core/memory_size.h"
#include "cuda/problem.h"
#include "polyhead/attention.h"

namespace polyhead::cuda {

// Of the gradients of bias and slopes, or of returned weights and column sums, each in its place of `sums`.
struct Cuts {
  PairSums sums[2];
};
Cuts gradient_cuts(const AttentionDesc& desc);
Cuts weight_cuts(const AttentionDesc& desc);

// Both sums take the same memory, one after the other.
MemorySize partial_bytes(const Cuts& cuts);

// `sums` are not set where the result is not given.
void set_sums(const PairSums& cut, const Broadcast& result, void* partial, PairSums* sums);

// Weights and column sums, as [batch, 1 or heads, 1 or queries, keys].
Broadcast weights_of(const Tensor& t);
Broadcast column_sums_of(const Tensor& t);

// Of the gradients of captures.
MemorySize capture_bytes(const AttentionDesc& desc);
CaptureSums capture_sums(const AttentionDesc& desc, const BackwardArgs& args, void* memory);

}  // namespace polyhead::cuda
