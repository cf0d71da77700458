// A checked forward call in the CPU kernels' terms, and what is the same on every path through them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "contract/sequences.h"
#include "core/memory_size.h"
#include "core/threads.h"
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

// Tasks that follow each other and read little, which one thread takes in its turn: as many as read 128 KiB, while each
// thread has 16 turns. By turns of one, two threads read what lies side by side, which misleads the hardware's prefetching:
// on two threads 64x12x1/16x64 took 1.2 to 1.3 times as long, 64x12x9x64 1.1 to 1.2 (Xeon, family 6 model 106).
inline int64_t tasks_of_turn(int64_t tasks, const AttentionDesc& desc, int64_t keys, int64_t heads_kv,
                             int num_threads) {
  const int64_t row_bytes =
      numbers_bytes(key_dtype(desc), desc.head_dim) + numbers_bytes(value_dtype(desc), desc.head_dim_v);
  constexpr int64_t kTurnBytes = 128 * 1024;
  const int64_t rows = std::min(keys, kTurnBytes) * heads_kv;  // no product is too large
  const int64_t of_bytes = kTurnBytes / std::clamp<int64_t>(row_bytes, 1, kTurnBytes) / std::max<int64_t>(rows, 1);
  return std::clamp<int64_t>(of_bytes, 1, std::max<int64_t>(1, tasks / (16 * int64_t{num_threads})));
}

// Calls task(index, lane, the index that the thread will probably take next), `at_once` of them in a thread's turn.
template <class Task>
void run_in_turns(const Run& run, int64_t num_tasks, int64_t at_once, const Task& task) {
  run_tasks(run, pieces(num_tasks, at_once), [&](int64_t turn, int lane) {
    const int64_t first = turn * at_once, end = std::min(num_tasks, first + at_once);
    for (int64_t i = first; i + 1 < end; ++i) task(i, lane, i + 1);
    task(end - 1, lane, first + run.num_threads * at_once);
  });
}

// What a program needs beside an instruction set's own scratch.
inline MemorySize program_bytes(const AttentionDesc& desc, bool backward) {
  if (desc.program == nullptr) return 0;
  const ProgramLayout layout(program::schedule_of(*desc.program), backward);
  return MemorySize(layout.bytes() + ProgramLayout::kAlignment).rounded_up(64);
}

}  // namespace polyhead::cpu
