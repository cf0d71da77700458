#include "cpu/attention/attn_weights_tasks.h"

#include <algorithm>
#include <cstring>

#include "core/threads.h"
#include "cpu/attention/call.h"

namespace polyhead::cpu {
namespace {

MemorySize mean_bytes(const AttentionDesc& desc) {
  return desc.return_weights == ReturnWeights::kMean ? MemorySize(desc.seqlen_k) * (kTileQueries * sizeof(float)) : 0;
}

MemorySize column_bytes(const IsaFunctions& functions, const AttentionDesc& desc) {
  return desc.return_column_sums ? MemorySize(desc.seqlen_k) * functions.lanes * sizeof(float) : 0;
}

MemorySize tile_bytes(const IsaFunctions& functions, const AttentionDesc& desc) {
  return scratch_bytes(functions.forward_scratch_bytes, desc, 1, desc.attn_bias.given) + program_bytes(desc, false);
}

// A thread's memory: scratch for one tile, then what a task adds up.
MemorySize lane_bytes(const IsaFunctions& functions, const AttentionDesc& desc) {
  return tile_bytes(functions, desc) + (mean_bytes(desc) + column_bytes(functions, desc)).rounded_up(64);
}

struct Call {
  const IsaFunctions& functions;
  const AttentionDesc& desc;
  const ForwardArgs& args;
  const Sequences& sequences;
  const Problem problem;

  char* scratch(int lane) const {
    return static_cast<char*>(args.workspace) + lane_bytes(functions, desc).value() * static_cast<size_t>(lane);
  }
  float* sums(int lane) const { return reinterpret_cast<float*>(scratch(lane) + tile_bytes(functions, desc).value()); }
};

// One tile of one head; rows behind len_q are hidden.
void run_tile(const Call& call, const ForwardTask& task, int64_t end, int lane) {
  if (task.num_queries > 0) call.functions.forward_tiles(call.problem, task, call.scratch(lane));
  hide_rows(call.problem, task.b, task.h, task.first_query + task.num_queries, end);
}

ForwardTask tile_task(const Call& call, const Sequence& s, int64_t b, int64_t h, int64_t first) {
  const int64_t end = std::min(first + kTileQueries, call.desc.seqlen_q);
  ForwardTask task{s, b, h, first, std::clamp(s.len_q, first, end) - first};
  task.attn_weights = call.desc.return_weights == ReturnWeights::kPerHead;
  return task;
}

// Rows of weights as they are where nothing is seen.
void clear_weights(const Problem& p, int64_t b, int64_t h, int64_t first, int64_t end) {
  if (p.seqlen_k == 0) return;  // there may be no memory
  const int64_t bytes = element_bytes(p.dtype);
  for (int64_t i = first; i < end; ++i) {
    char* row = static_cast<char*>(p.attn_weights) +
                (b * p.weights_stride_b + h * p.weights_stride_h + i * p.weights_stride_q) * bytes;
    if (p.weights_stride_k == 1) {
      std::memset(row, 0, static_cast<size_t>(p.seqlen_k * bytes));
      continue;
    }
    for (int64_t k = 0; k < p.seqlen_k; ++k) {
      std::memset(row + k * p.weights_stride_k * bytes, 0, static_cast<size_t>(bytes));
    }
  }
}

// All tiles of one head, in order: column sums are its own.
void run_head(const Call& call, int64_t b, int64_t h, int lane) {
  const AttentionDesc& desc = call.desc;
  const Sequence& s = call.sequences[b];
  float* columns = desc.return_column_sums ? call.sums(lane) : nullptr;
  const size_t lanes = static_cast<size_t>(call.functions.lanes);
  if (columns != nullptr) std::memset(columns, 0, column_bytes(call.functions, desc).value());
  for (int64_t first = 0; first < desc.seqlen_q; first += kTileQueries) {
    ForwardTask task = tile_task(call, s, b, h, first);
    task.columns = columns;
    const int64_t end = std::min(first + kTileQueries, desc.seqlen_q);
    if (task.attn_weights) clear_weights(call.problem, b, h, first, end);
    run_tile(call, task, end, lane);
  }
  if (columns == nullptr) return;
  const Tensor& sums = call.args.column_sums;
  for (int64_t k = 0; k < desc.seqlen_k; ++k) {
    float sum = 0;
    for (size_t i = 0; i < lanes; ++i) sum += columns[static_cast<size_t>(k) * lanes + i];
    static_cast<float*>(sums.data)[b * sums.strides[0] + h * sums.strides[1] + k * sums.strides[2]] = sum;
  }
}

// One tile of every head, in order: the mean is their own.
void run_mean(const Call& call, int64_t b, int64_t first, int lane) {
  const AttentionDesc& desc = call.desc;
  const Sequence& s = call.sequences[b];
  float* mean = call.sums(lane);
  std::memset(mean, 0, mean_bytes(desc).value());
  const int64_t end = std::min(first + kTileQueries, desc.seqlen_q);
  int64_t num_queries = 0;
  for (int64_t h = 0; h < desc.num_heads; ++h) {
    ForwardTask task = tile_task(call, s, b, h, first);
    task.mean = mean;
    num_queries = task.num_queries;
    run_tile(call, task, end, lane);
  }
  call.functions.store_mean(call.problem, b, first, num_queries, mean);
  clear_weights(call.problem, b, 0, first + num_queries, end);
}

}  // namespace

MemorySize weights_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads) {
  return lane_bytes(functions, desc) * num_threads;
}

void weights_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                     const Sequences& sequences, const Run& run) {
  const Call call{functions, desc, args, sequences, problem(desc, args)};
  if (desc.return_column_sums || desc.return_weights == ReturnWeights::kPerHead) {
    run_tasks(run, desc.batch * desc.num_heads,
              [&](int64_t index, int lane) { run_head(call, index / desc.num_heads, index % desc.num_heads, lane); });
  }
  if (desc.return_weights != ReturnWeights::kMean) return;
  const int64_t tiles = tiles_of(desc);
  run_tasks(run, desc.batch * tiles,
            [&](int64_t index, int lane) { run_mean(call, index / tiles, index % tiles * kTileQueries, lane); });
}

}  // namespace polyhead::cpu
