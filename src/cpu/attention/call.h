// A checked forward call in the CPU kernels' terms, and what is the same on every path through them.
#pragma once

#include <type_traits>

#include "contract/sequences.h"
#include "core/memory_size.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/program/memory.h"
#include "program/schedule.h"

namespace polyhead::cpu {

Problem problem(const AttentionDesc& desc, const ForwardArgs& args);
BackwardProblem backward_problem(const AttentionDesc& desc, const BackwardArgs& args);

// Whether gradients of query, key or value are asked for.
inline bool asks_for_products(const BackwardArgs& args) {
  return args.grad_query.given() || args.grad_key.given() || args.grad_value.given();
}

// Rows [first, end) of one head become 0.
void clear_rows(const Operand& x, int64_t b, int64_t h, int64_t first, int64_t end, int64_t dim);

// Rows [first, end) of one head that see nothing (padding; rows behind the last packed sequence): O = 0, L = -inf.
void hide_rows(const Problem& problem, int64_t b, int64_t h, int64_t first, int64_t end);

// Scratch memory as a function of one instruction set's table tells it. Those compute in plain 64 bits: beyond head dims
// that no machine has memory for they are not asked.
template <class... Options>
MemorySize scratch_bytes(size_t (*bytes)(int64_t, int64_t, Options...), const AttentionDesc& desc,
                         std::type_identity_t<Options>... options) {
  constexpr int64_t kMost = int64_t{1} << 40;
  if (desc.head_dim > kMost || desc.head_dim_v > kMost) return MemorySize::too_large();
  return bytes(desc.head_dim, desc.head_dim_v, options...);
}

// Of the queries of a head.
inline int64_t tiles_of(const AttentionDesc& desc) { return pieces(desc.seqlen_q, kTileQueries); }

// What a program needs beside an instruction set's own scratch.
inline MemorySize program_bytes(const AttentionDesc& desc, bool backward) {
  if (desc.program == nullptr) return 0;
  const ProgramLayout layout(program::schedule_of(*desc.program), backward);
  return MemorySize(layout.bytes() + ProgramLayout::kAlignment).rounded_up(64);
}

}  // namespace polyhead::cpu
