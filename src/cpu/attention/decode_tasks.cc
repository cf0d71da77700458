#include "cpu/attention/decode_tasks.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "core/threads.h"
#include "cpu/attention/call.h"

namespace polyhead::cpu {
namespace {

constexpr int64_t kMaxQueries = 12;  // more fill the lanes of the general path

// Tasks are (sequence, key/value head, run of rows, chunk of keys), the last fastest.
struct Tasks {
  int64_t rows, runs, chunks, heads_kv;
  int run_rows;
  MemorySize partial_bytes, scratch_bytes;  // of a chunk; of a thread

  Tasks(const IsaFunctions& functions, const AttentionDesc& desc)
      : rows(desc.num_heads_kv > 0 ? desc.num_heads / desc.num_heads_kv * desc.seqlen_q : 0),
        runs(pieces(rows, kDecodeRows)),
        chunks(std::max<int64_t>(1, pieces(desc.seqlen_k, kDecodeChunk))),
        heads_kv(desc.num_heads_kv),
        run_rows(static_cast<int>(std::min<int64_t>(rows, kDecodeRows))),
        scratch_bytes(cpu::scratch_bytes(functions.decode_scratch_bytes, desc, run_rows)) {
    partial_bytes = scratch_bytes.fits() ? functions.decode_partial_bytes(desc.head_dim_v, run_rows) : scratch_bytes;
  }

  int64_t num_runs(const AttentionDesc& desc) const { return desc.batch * heads_kv * runs; }

  // A run of one chunk needs no memory that outlives its task.
  bool merges() const { return chunks > 1; }
  MemorySize lane_bytes() const { return scratch_bytes + (merges() ? 0 : partial_bytes); }
  MemorySize counter_bytes(const AttentionDesc& desc) const {
    return merges() ? (MemorySize(num_runs(desc)) * sizeof(std::atomic<int64_t>)).rounded_up(64) : 0;
  }
  MemorySize partials_bytes(const AttentionDesc& desc) const {
    return merges() ? partial_bytes * num_runs(desc) * chunks : 0;
  }

  DecodeTask at(const AttentionDesc& desc, const Sequences& sequences, int64_t run) const {
    DecodeTask task;
    task.b = run / runs / heads_kv;
    task.kv_head = run / runs % heads_kv;
    task.sequence = sequences[task.b];
    task.first_row = run % runs * kDecodeRows;
    const int64_t computed = desc.num_heads / heads_kv * task.sequence.len_q;
    task.num_rows = static_cast<int>(std::clamp<int64_t>(computed - task.first_row, 0, kDecodeRows));
    return task;
  }
};

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
  return !desc.packed && desc.seqlen_q > 0 && desc.seqlen_q <= kMaxQueries;
}

MemorySize decode_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads) {
  const Tasks tasks(functions, desc);
  return tasks.counter_bytes(desc) + tasks.partials_bytes(desc) + tasks.lane_bytes() * num_threads;
}

void decode_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                    const Sequences& sequences, const Run& run) {
  const Problem p = problem(desc, args);
  const Tasks tasks(functions, desc);
  auto* unfinished = static_cast<std::atomic<int64_t>*>(args.workspace);
  char* partials = static_cast<char*>(args.workspace) + tasks.counter_bytes(desc).value();
  char* lanes = partials + tasks.partials_bytes(desc).value();
  const int64_t num_runs = tasks.num_runs(desc);
  if (tasks.merges()) {
    for (int64_t i = 0; i < num_runs; ++i) std::construct_at(unfinished + i, tasks.chunks);
  }
  const bool heads_inside_rows = p.key.stride_h < p.key.stride_s;
  run_tasks(run, num_runs * tasks.chunks, [&](int64_t index, int lane) {
    int64_t rows_run = index / tasks.chunks, chunk = index % tasks.chunks;
    if (heads_inside_rows) {
      const int64_t heads = tasks.heads_kv * tasks.runs, b = index / (heads * tasks.chunks);
      rows_run = b * heads + index % heads;
      chunk = index / heads % tasks.chunks;
    }
    const DecodeTask task = tasks.at(desc, sequences, rows_run);
    char* scratch = lanes + tasks.lane_bytes().value() * static_cast<size_t>(lane);
    char* first_partial = tasks.merges()
                              ? partials + static_cast<size_t>(rows_run * tasks.chunks) * tasks.partial_bytes.value()
                              : scratch + tasks.scratch_bytes.value();
    const size_t task_partial_bytes = functions.decode_partial_bytes(desc.head_dim_v, task.num_rows);
    auto* partial = reinterpret_cast<float*>(first_partial + static_cast<size_t>(chunk) * task_partial_bytes);
    if (task.num_rows > 0) functions.decode_chunk(p, task, chunk, partial, scratch);
    // The one that takes the last of them sees what all others wrote.
    if (tasks.merges() && unfinished[rows_run].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    end_run(functions, p, desc, task, reinterpret_cast<float*>(first_partial), tasks.chunks);
  });
}

}  // namespace polyhead::cpu
