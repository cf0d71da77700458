#include "cpu/attention/tiles.h"

#include <algorithm>
#include <cstring>

#include "core/threads.h"
#include "cpu/attention/call.h"
#include "cpu/attention/decode_tasks.h"

namespace polyhead::cpu {
namespace {

// How many tiles a task holds: more amortise the copying of keys and values, fewer give every thread work. They change
// no bit of the result.
int tiles_per_task(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads) {
  const MemorySize tile_bytes = (MemorySize(desc.head_dim) + desc.head_dim_v) * (kTileQueries * sizeof(float));
  const size_t cache_bytes = 384 * 1024;  // of a 1 MiB L2: the rest is for keys, values and weights
  const size_t fitting = std::clamp<size_t>(cache_bytes / std::max<size_t>(tile_bytes.value(), 1), 1,
                                            static_cast<size_t>(functions.forward_tiles_at_once));
  const MemorySize tiles = MemorySize(tiles_of(desc)) * desc.batch * desc.num_heads;
  const size_t tasks = num_threads < 8 ? 4 : 8;  // of a thread: the more threads, the longer they wait for the last one
  const size_t spread = std::max<size_t>(1, tiles.value() / (tasks * static_cast<size_t>(num_threads)));
  return static_cast<int>(std::min(fitting, spread));
}

MemorySize chunk_table_bytes(const AttentionDesc& desc) {
  return desc.packed ? (MemorySize(desc.batch) + 1) * sizeof(int64_t) : 0;
}

// Where things lie in a call's workspace; the table of chunks comes first.
struct Workspace {
  size_t lanes = 0, lane_bytes = 0;
  MemorySize bytes;

  Workspace(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads) {
    const MemorySize scratch = scratch_bytes(functions.forward_scratch_bytes, desc,
                                             tiles_per_task(functions, desc, num_threads), desc.attn_bias.given) +
                               program_bytes(desc, false);
    MemoryMap map;
    map.take_bytes(chunk_table_bytes(desc));
    lanes = map.take_bytes(scratch * num_threads);
    lane_bytes = scratch.value();
    bytes = map.bytes();
  }
};

}  // namespace

MemorySize tiles_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads) {
  return Workspace(functions, desc, num_threads).bytes;
}

TileTasks::TileTasks(const IsaFunctions& functions, const AttentionDesc& desc, const Problem& problem,
                     const Sequences& sequences, int num_threads, void* memory)
    : functions_(functions),
      desc_(desc),
      problem_(problem),
      sequences_(sequences),
      chunk_queries_(int64_t{tiles_per_task(functions, desc, num_threads)} * kTileQueries),
      share_bias_(problem.bias.data != nullptr && problem.bias.stride_b == 0 && problem.bias.stride_q != 0 &&
                  problem.group == 1),
      first_chunk_(static_cast<int64_t*>(memory)) {
  const Workspace workspace(functions, desc, num_threads);
  lanes_ = static_cast<char*>(memory) + workspace.lanes;
  lane_bytes_ = workspace.lane_bytes;
  if (!desc.packed) return;
  first_chunk_[0] = 0;
  for (int64_t b = 0; b < desc.batch; ++b) {
    const Sequence& s = sequences[b];
    first_chunk_[b + 1] = first_chunk_[b] + (decode_takes(desc, s) ? 0 : chunks_of(s.len_q));
  }
}

int64_t TileTasks::count() const {
  const int64_t of_head = desc_.packed ? first_chunk_[desc_.batch] : desc_.batch * chunks_of(desc_.seqlen_q);
  return of_head * desc_.num_heads;
}

// Heads one after the other, so that keys and values stay in the cache; or all sequences of a head, so that the bias that
// they share does, which is larger. The last queries of a head first, because causal gives them the most work.
TileTasks::At TileTasks::at(int64_t index) const {
  if (!desc_.packed) {
    const int64_t chunks = chunks_of(desc_.seqlen_q);
    const int64_t head = index / chunks, first_query = (chunks - 1 - index % chunks) * chunk_queries_;
    if (share_bias_) return {head % desc_.batch, head / desc_.batch, first_query};
    return {head / desc_.num_heads, head % desc_.num_heads, first_query};
  }
  const int64_t* next = std::upper_bound(first_chunk_, first_chunk_ + desc_.batch + 1, index / desc_.num_heads);
  const int64_t b = next - first_chunk_ - 1;
  const int64_t within = index - first_chunk_[b] * desc_.num_heads;
  const int64_t chunks = first_chunk_[b + 1] - first_chunk_[b];
  return {b, within / chunks, (chunks - 1 - within % chunks) * chunk_queries_};
}

// What of the chunk `then` is not yet in the cache of a thread that computes `now`.
NextRows TileTasks::next_rows(const At& now, const At& then) const {
  const Sequence& s = sequences_[then.b];
  const int64_t queries = std::clamp<int64_t>(s.len_q - then.first_query, 0, chunk_queries_);
  NextRows next{s, then.b, then.h, then.first_query, queries};
  const int64_t group = desc_.num_heads / desc_.num_heads_kv;
  next.other_keys = then.b != now.b || then.h / group != now.h / group;
  return next;
}

void TileTasks::run(int64_t index, int lane, int64_t next) const {
  const At now = at(index);
  const Sequence& s = sequences_[now.b];
  const int64_t padded = desc_.packed ? s.len_q : desc_.seqlen_q;
  const int64_t end = std::min(now.first_query + chunk_queries_, padded);
  const int64_t computed = std::clamp(s.len_q, now.first_query, end);
  ForwardTask task{s, now.b, now.h, now.first_query, computed - now.first_query};
  if (next < count()) task.next = next_rows(now, at(next));
  if (task.num_queries > 0) {
    functions_.forward_tiles(problem_, task, lanes_ + lane_bytes_ * static_cast<size_t>(lane));
  }
  hide_rows(problem_, now.b, now.h, computed, end);
}

void tiles_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                   const Sequences& sequences, const Run& run) {
  const Problem p = problem(desc, args);
  const TileTasks tasks(functions, desc, p, sequences, run.num_threads, args.workspace);
  const int64_t at_once = tasks_of_turn(tasks.count(), desc, desc.seqlen_k, 1, run.num_threads);
  run_in_turns(run, tasks.count(), at_once,
               [&](int64_t index, int lane, int64_t next) { tasks.run(index, lane, next); });
}

}  // namespace polyhead::cpu
