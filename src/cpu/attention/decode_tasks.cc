#include "cpu/attention/decode_tasks.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "core/threads.h"
#include "cpu/attention/call.h"

namespace polyhead::cpu {
namespace {

constexpr int64_t kMaxQueries = 12;  // more fill the lanes of the general path

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Tasks are (sequence, key/value head, run of rows, chunk of keys), the last fastest.
struct Tasks {
  int64_t rows, runs, chunks, heads_kv;
  int run_rows;
  size_t partial_bytes, scratch_bytes;

  Tasks(const IsaFunctions& functions, const AttentionDesc& desc)
      : rows(desc.num_heads_kv > 0 ? desc.num_heads / desc.num_heads_kv * desc.seqlen_q : 0),
        runs(pieces(rows, kDecodeRows)),
        chunks(std::max<int64_t>(1, pieces(desc.seqlen_k, kDecodeChunk))),
        heads_kv(desc.num_heads_kv),
        run_rows(static_cast<int>(std::min<int64_t>(rows, kDecodeRows))),
        partial_bytes(functions.decode_partial_bytes(desc.head_dim_v, run_rows)),
        scratch_bytes(functions.decode_scratch_bytes(desc.head_dim, desc.head_dim_v, run_rows)) {}

  int64_t num_runs(const AttentionDesc& desc) const { return desc.batch * heads_kv * runs; }

  // A run of one chunk needs no memory that outlives its task.
  bool merges() const { return chunks > 1; }
  size_t lane_bytes() const { return scratch_bytes + (merges() ? 0 : partial_bytes); }
  size_t counter_bytes(const AttentionDesc& desc) const {
    return merges() ? (static_cast<size_t>(num_runs(desc)) * sizeof(std::atomic<int64_t>) + 63) / 64 * 64 : 0;
  }
  size_t partials_bytes(const AttentionDesc& desc) const {
    return merges() ? static_cast<size_t>(num_runs(desc) * chunks) * partial_bytes : 0;
  }

  DecodeTask at(const AttentionDesc& desc, const ForwardArgs& args, int64_t run) const {
    DecodeTask task;
    task.b = run / runs / heads_kv;
    task.kv_head = run / runs % heads_kv;
    task.sequence = sequence(desc, args, task.b);
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

size_t decode_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads) {
  const Tasks tasks(functions, desc);
  return tasks.counter_bytes(desc) + tasks.partials_bytes(desc) + tasks.lane_bytes() * static_cast<size_t>(num_threads);
}

void decode_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                    Executor& executor) {
  const Problem p = problem(desc, args);
  const Tasks tasks(functions, desc);
  auto* unfinished = static_cast<std::atomic<int64_t>*>(args.workspace);
  char* partials = static_cast<char*>(args.workspace) + tasks.counter_bytes(desc);
  char* lanes = partials + tasks.partials_bytes(desc);
  const int64_t num_runs = tasks.num_runs(desc);
  if (tasks.merges()) {
    for (int64_t run = 0; run < num_runs; ++run) std::construct_at(unfinished + run, tasks.chunks);
  }
  const bool heads_inside_rows = p.key.stride_h < p.key.stride_s;
  run_tasks(executor, num_runs * tasks.chunks, [&](int64_t index, int lane) {
    int64_t run = index / tasks.chunks, chunk = index % tasks.chunks;
    if (heads_inside_rows) {
      const int64_t heads = tasks.heads_kv * tasks.runs, b = index / (heads * tasks.chunks);
      run = b * heads + index % heads;
      chunk = index / heads % tasks.chunks;
    }
    const DecodeTask task = tasks.at(desc, args, run);
    char* scratch = lanes + tasks.lane_bytes() * static_cast<size_t>(lane);
    char* first_partial = tasks.merges() ? partials + static_cast<size_t>(run * tasks.chunks) * tasks.partial_bytes
                                         : scratch + tasks.scratch_bytes;
    const size_t task_partial_bytes = functions.decode_partial_bytes(desc.head_dim_v, task.num_rows);
    auto* partial = reinterpret_cast<float*>(first_partial + static_cast<size_t>(chunk) * task_partial_bytes);
    if (task.num_rows > 0) functions.decode_chunk(p, task, chunk, partial, scratch);
    // The one that takes the last of them sees what all others wrote.
    if (tasks.merges() && unfinished[run].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    end_run(functions, p, desc, task, reinterpret_cast<float*>(first_partial), tasks.chunks);
  });
}

}  // namespace polyhead::cpu
