#include "cpu/attention/decode_tasks.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "core/threads.h"
#include "cpu/attention/call.h"

namespace polyhead::cpu {
namespace {

// Of one key and its neighbours in memory, of as many heads as a task takes at once: two pages. 16 of them, the block that
// is read and the one that is asked for, are in L2.
constexpr int64_t kRowBytes = 8192;

// Runs are (sequence, key/value head, run of rows); a task is a run, or the only runs of neighbouring heads, and a chunk of
// keys.
struct Tasks {
  int64_t rows, runs, chunks, heads_kv;
  int run_rows;
  int heads;                                // of a task at most: results do not depend on it
  MemorySize partial_bytes, scratch_bytes;  // of a chunk; of a thread

  Tasks(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads)
      : rows(desc.num_heads_kv > 0 ? desc.num_heads / desc.num_heads_kv * desc.seqlen_q : 0),
        runs(pieces(rows, kDecodeRows)),
        chunks(std::max<int64_t>(1, pieces(desc.seqlen_k, kDecodeChunk))),
        heads_kv(desc.num_heads_kv),
        run_rows(static_cast<int>(std::min<int64_t>(rows, kDecodeRows))),
        heads(most_heads(desc, num_threads)),
        scratch_bytes(cpu::scratch_bytes(functions.decode_scratch_bytes, desc, run_rows, heads) +
                      program_bytes(desc, false)) {
    partial_bytes = scratch_bytes.fits() ? functions.decode_partial_bytes(desc.head_dim_v, run_rows) : scratch_bytes;
  }

  // As many as a task may have rows of and read whole pages of, while each thread has four tasks.
  int most_heads(const AttentionDesc& desc, int num_threads) const {
    if (runs != 1 || heads_kv == 0) return 1;
    const int64_t head_bytes =
        std::max<int64_t>(1, std::max(desc.head_dim, desc.head_dim_v)) * element_bytes(desc.dtype);
    const int64_t most = std::min<int64_t>(kDecodeRows / padded_rows(run_rows), kRowBytes / head_bytes);
    const int64_t for_threads =
        num_threads < 2 ? heads_kv : desc.batch * chunks * heads_kv / (4 * int64_t{num_threads});
    const int64_t heads_of_task = std::clamp<int64_t>(std::min(most, for_threads), 1, heads_kv);
    return static_cast<int>(pieces(heads_kv, pieces(heads_kv, heads_of_task)));
  }

  int64_t num_runs(const AttentionDesc& desc) const { return desc.batch * heads_kv * runs; }

  // A run of one chunk needs no memory that outlives its task.
  bool merges() const { return chunks > 1; }
  MemorySize lane_bytes() const { return scratch_bytes + (merges() ? 0 : partial_bytes * heads); }
  MemorySize counter_bytes(const AttentionDesc& desc) const {
    return merges() ? (MemorySize(num_runs(desc)) * sizeof(std::atomic<int64_t>)).rounded_up(64) : 0;
  }
  MemorySize partials_bytes(const AttentionDesc& desc) const {
    return merges() ? partial_bytes * num_runs(desc) * chunks : 0;
  }

  DecodeTask at(const AttentionDesc& desc, const Sequences& sequences, int64_t run, int64_t num_heads) const {
    DecodeTask task;
    task.b = run / runs / heads_kv;
    task.kv_head = run / runs % heads_kv;
    task.num_heads = static_cast<int>(std::min(num_heads, heads_kv - task.kv_head));
    task.sequence = sequences[task.b];
    task.first_row = run % runs * kDecodeRows;
    const int64_t computed = desc.num_heads / heads_kv * task.sequence.len_q;
    task.num_rows = static_cast<int>(std::clamp<int64_t>(computed - task.first_row, 0, kDecodeRows));
    return task;
  }
};

// Chunks [first, end) of keys.
struct Chunks {
  int64_t first, end;
};

// Outside of which no row sees a key: at least one. `chunks`: that there are.
Chunks chunks_to_compute(const AttentionDesc& desc, const Problem& p, const Sequences& sequences, int64_t chunks) {
  KeyRange keys{INT64_MAX, 0};
  program::Region region{{0, desc.batch - 1}, {0, desc.num_heads - 1}, {0, desc.seqlen_q - 1}, {}, {INT64_MAX, 0}};
  for (int64_t b = 0; chunks > 1 && b < desc.batch; ++b) {
    const Sequence& s = sequences[b];
    region.offset = {std::min(region.offset.low, s.offset), std::max(region.offset.high, s.offset)};
    for (int64_t i = 0; i < s.len_q; ++i) {
      const KeyRange seen = key_range(p.band, s, i);
      if (seen.begin < seen.end) keys = {std::min(keys.begin, seen.begin), std::max(keys.end, seen.end)};
    }
  }
  if (keys.begin >= keys.end) return {0, 1};
  Chunks range{keys.begin / kDecodeChunk, pieces(keys.end, kDecodeChunk)};
  const auto hidden = [&](int64_t first, int64_t end) {
    region.k = {first * kDecodeChunk, std::min(end * kDecodeChunk, keys.end) - 1};
    return program::seen(p.program, region) == program::Seen::kNone;
  };
  for (int64_t count = desc.program != nullptr ? range.end - range.first : 0; count > 0; count /= 2) {
    while (count < range.end - range.first && hidden(range.first, range.first + count)) range.first += count;
    while (count < range.end - range.first && hidden(range.end - count, range.end)) range.end -= count;
  }
  return range;
}

// Whether rows of neighbouring heads follow each other in memory.
bool heads_side_by_side(const Operand& x, int64_t dim) {
  return x.stride_d == 1 && x.stride_h * element_bytes(x.dtype) == numbers_bytes(x.dtype, dim) &&
         x.stride_h < x.stride_s;
}

// What a run's last chunk to end does: merge. Then padding behind the queries.
void end_run(const IsaFunctions& functions, const Problem& problem, const AttentionDesc& desc, const DecodeTask& task,
             float* partials, int64_t num_partials) {
  if (task.num_rows > 0) functions.decode_merge(problem, task, partials, num_partials);
  if (task.first_row > 0 || task.sequence.len_q == desc.seqlen_q) return;
  for (int64_t h = task.kv_head * problem.group; h < (task.kv_head + 1) * problem.group; ++h) {
    hide_rows(problem, task.b, h, task.sequence.len_q, desc.seqlen_q);
  }
}

}  // namespace

bool decode_takes(const AttentionDesc& desc) {
  return !desc.packed && desc.seqlen_q > 0 && desc.seqlen_q <= kMaxDecodeQueries;
}

MemorySize decode_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads) {
  const Tasks tasks(functions, desc, num_threads);
  return tasks.counter_bytes(desc) + tasks.partials_bytes(desc) + tasks.lane_bytes() * num_threads;
}

void decode_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                    const Sequences& sequences, const Run& run) {
  const Problem p = problem(desc, args);
  const Tasks tasks(functions, desc, run.num_threads);
  auto* unfinished = static_cast<std::atomic<int64_t>*>(args.workspace);
  char* partials = static_cast<char*>(args.workspace) + tasks.counter_bytes(desc).value();
  char* lanes = partials + tasks.partials_bytes(desc).value();
  const Chunks range = chunks_to_compute(desc, p, sequences, tasks.chunks);
  const int64_t chunks = range.end - range.first;
  if (tasks.merges()) {
    for (int64_t i = 0; i < tasks.num_runs(desc); ++i) std::construct_at(unfinished + i, chunks);
  }
  const bool heads_inside_rows = p.key.stride_h < p.key.stride_s;
  const bool side_by_side = heads_side_by_side(p.key, desc.head_dim) && heads_side_by_side(p.value, desc.head_dim_v);
  const int64_t task_heads = side_by_side ? tasks.heads : 1;
  const int64_t sequence_runs = tasks.heads_kv * tasks.runs, sequence_groups = pieces(sequence_runs, task_heads);
  run_tasks(run, desc.batch * sequence_groups * chunks, [&](int64_t index, int lane) {
    const int64_t b = index / (sequence_groups * chunks), in_sequence = index % (sequence_groups * chunks);
    const int64_t group = heads_inside_rows ? in_sequence % sequence_groups : in_sequence / chunks;
    const int64_t chunk = heads_inside_rows ? in_sequence / sequence_groups : in_sequence % chunks;
    const int64_t first_run = b * sequence_runs + group * task_heads;
    const DecodeTask task = tasks.at(desc, sequences, first_run, task_heads);
    char* scratch = lanes + tasks.lane_bytes().value() * static_cast<size_t>(lane);
    const size_t run_bytes = tasks.partial_bytes.value() * static_cast<size_t>(tasks.chunks);
    char* first_partial =
        tasks.merges() ? partials + static_cast<size_t>(first_run) * run_bytes : scratch + tasks.scratch_bytes.value();
    const size_t task_partial_bytes = functions.decode_partial_bytes(desc.head_dim_v, task.num_rows);
    if (task.num_rows > 0) {
      auto* partial = reinterpret_cast<float*>(first_partial + static_cast<size_t>(chunk) * task_partial_bytes);
      functions.decode_chunk(p, task, range.first + chunk, partial, static_cast<int64_t>(run_bytes / sizeof(float)),
                             scratch);
    }
    DecodeTask head = task;
    head.num_heads = 1;
    for (int h = 0; h < task.num_heads; ++h, ++head.kv_head) {
      // The one that takes the last of them sees what all others wrote.
      if (tasks.merges() && unfinished[first_run + h].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
      auto* head_partials = reinterpret_cast<float*>(first_partial + static_cast<size_t>(h) * run_bytes);
      end_run(functions, p, desc, head, head_partials, chunks);
    }
  });
}

}  // namespace polyhead::cpu
