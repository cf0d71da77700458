#include "cpu/attention/tiles.h"

#include <algorithm>
#include <cstring>

#include "core/threads.h"
#include "cpu/attention/call.h"

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

// Queries of a sequence, padding included, are cut into chunks; first_chunk[b] counts those of the sequences before b.
class Chunks {
 public:
  Chunks(const AttentionDesc& desc, const Sequences& sequences, int64_t chunk_queries, int64_t* first_chunk)
      : desc_(desc), chunk_queries_(chunk_queries), first_chunk_(first_chunk) {
    if (!desc.packed) return;
    first_chunk[0] = 0;
    for (int64_t b = 0; b < desc.batch; ++b) {
      first_chunk[b + 1] = first_chunk[b] + chunks_of(sequences[b].len_q);
    }
  }

  int64_t per_head() const {
    return desc_.packed ? first_chunk_[desc_.batch] : desc_.batch * chunks_of(desc_.seqlen_q);
  }
  int64_t count() const { return per_head() * desc_.num_heads; }

  struct At {
    int64_t b, h, first_query;
  };
  // Chunk `index`: heads one after the other, so that keys and values stay in the cache; the last queries of a head
  // first, because causal gives them the most work.
  At at(int64_t index) const {
    if (!desc_.packed) {
      const int64_t chunks = chunks_of(desc_.seqlen_q);
      const int64_t head = index / chunks;
      return {head / desc_.num_heads, head % desc_.num_heads, (chunks - 1 - index % chunks) * chunk_queries_};
    }
    const int64_t* next = std::upper_bound(first_chunk_, first_chunk_ + desc_.batch + 1, index / desc_.num_heads);
    const int64_t b = next - first_chunk_ - 1;
    const int64_t within = index - first_chunk_[b] * desc_.num_heads;
    const int64_t chunks = first_chunk_[b + 1] - first_chunk_[b];
    return {b, within / chunks, (chunks - 1 - within % chunks) * chunk_queries_};
  }

 private:
  int64_t chunks_of(int64_t queries) const { return pieces(queries, chunk_queries_); }

  const AttentionDesc& desc_;
  int64_t chunk_queries_;
  int64_t* first_chunk_;  // [batch + 1], only when packed
};

// What of chunk `then` is not yet in the cache of a thread that computes `now`.
NextRows next_rows(const AttentionDesc& desc, const Sequences& sequences, const Chunks::At& now, const Chunks::At& then,
                   int64_t chunk_queries) {
  const Sequence& s = sequences[then.b];
  const int64_t queries = std::clamp<int64_t>(s.len_q - then.first_query, 0, chunk_queries);
  NextRows next{then.b, then.h, s.first_q + then.first_query, queries, s.first_k, s.len_k};
  const int64_t group = desc.num_heads / desc.num_heads_kv;
  if (queries == 0 || (then.b == now.b && then.h / group == now.h / group)) next.num_keys = 0;
  return next;
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
                                             tiles_per_task(functions, desc, num_threads), has_additive(desc)) +
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

void tiles_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                   const Sequences& sequences, const Run& run) {
  const Problem p = problem(desc, args);
  const int tiles = tiles_per_task(functions, desc, run.num_threads);
  const int64_t chunk_queries = int64_t{tiles} * kTileQueries;
  const Chunks chunks(desc, sequences, chunk_queries, static_cast<int64_t*>(args.workspace));
  const Workspace workspace(functions, desc, run.num_threads);
  char* scratch = static_cast<char*>(args.workspace) + workspace.lanes;
  run_tasks(run, chunks.count(), [&](int64_t index, int lane) {
    const Chunks::At at = chunks.at(index);
    const Sequence& s = sequences[at.b];
    const int64_t padded = desc.packed ? s.len_q : desc.seqlen_q;
    const int64_t end = std::min(at.first_query + chunk_queries, padded);
    const int64_t computed = std::clamp(s.len_q, at.first_query, end);
    ForwardTask task{s, at.b, at.h, at.first_query, computed - at.first_query};
    if (index + run.num_threads < chunks.count()) {
      task.next = next_rows(desc, sequences, at, chunks.at(index + run.num_threads), chunk_queries);
    }
    if (task.num_queries > 0)
      functions.forward_tiles(p, task, scratch + workspace.lane_bytes * static_cast<size_t>(lane));
    hide_rows(p, at.b, at.h, computed, end);
  });
  if (!desc.packed) return;
  for (int64_t h = 0; h < desc.num_heads; ++h) {
    hide_rows(p, 0, h, sequences.end_q(), desc.seqlen_q);
  }
}

}  // namespace polyhead::cpu
