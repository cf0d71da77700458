// Gradients of what a program captures: sums that backward_head adds to, one head's by themselves, and what ends them.
#pragma once

#include "contract/kernel.h"
#include "contract/sequences.h"
#include "core/memory_size.h"
#include "cpu/attention/functions.h"

namespace polyhead::cpu {

constexpr int kMostGathers = 128;  // steps of a program

// One call's: its program with what it captures, and memory of capture_sums_bytes.
struct CaptureGradients {
  const AttentionDesc& desc;
  const BackwardArgs& args;
  const Sequences& sequences;
  const program::Call& program;
  float* memory;
};

bool asks_for_captures(const BackwardArgs& args);
MemorySize capture_sums_bytes(const AttentionDesc& desc);

// Which heads may be computed at once, because no two add to the same elements.
struct Apart {
  bool batches, heads;
};
Apart apart(const CaptureGradients& captures);

// Before the first head.
void clear_captures(const CaptureGradients& captures);
// What a head adds to. `sums` has room for kMostGathers.
CaptureSums start_head(const CaptureGradients& captures, int64_t b, int64_t h, float** sums);
// All heads' sums -> args.grad_captures.
void finish_captures(const CaptureGradients& captures, const Run& run);

}  // namespace polyhead::cpu
