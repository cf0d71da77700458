#include "cpu/attention/weights_tasks.h"

#include <algorithm>
#include <cstring>

#include "core/threads.h"
#include "cpu/attention/call.h"

namespace polyhead::cpu {
namespace {

size_t mean_floats(const AttentionDesc& desc) {
  return desc.return_weights == ReturnWeights::kMean ? static_cast<size_t>(desc.seqlen_k) * kTileQueries : 0;
}

size_t column_floats(const IsaFunctions& functions, const AttentionDesc& desc) {
  return desc.return_column_sums ? static_cast<size_t>(desc.seqlen_k) * static_cast<size_t>(functions.lanes) : 0;
}

size_t tile_bytes(const IsaFunctions& functions, const AttentionDesc& desc) {
  return functions.forward_scratch_bytes(desc.head_dim, desc.head_dim_v, 1, has_additive(desc));
}

// A thread's memory: scratch for one tile, then what a task adds up.
size_t lane_bytes(const IsaFunctions& functions, const AttentionDesc& desc) {
  const size_t floats = mean_floats(desc) + column_floats(functions, desc);
  return tile_bytes(functions, desc) + (floats * sizeof(float) + 63) / 64 * 64;
}

struct Call {
  const IsaFunctions& functions;
  const AttentionDesc& desc;
  const ForwardArgs& args;
  const Problem problem;

  char* scratch(int lane) const {
    return static_cast<char*>(args.workspace) + lane_bytes(functions, desc) * static_cast<size_t>(lane);
  }
  float* sums(int lane) const { return reinterpret_cast<float*>(scratch(lane) + tile_bytes(functions, desc)); }
};

// One tile of one head; rows behind len_q are hidden.
void run_tile(const Call& call, const ForwardTask& task, int64_t end, int lane) {
  if (task.num_queries > 0) call.functions.forward_tiles(call.problem, task, call.scratch(lane));
  hide_rows(call.problem, task.b, task.h, task.first_query + task.num_queries, end);
}

ForwardTask tile_task(const Call& call, const Sequence& s, int64_t b, int64_t h, int64_t first) {
  const int64_t end = std::min(first + kTileQueries, call.desc.seqlen_q);
  ForwardTask task{s, b, h, first, std::clamp(s.len_q, first, end) - first};
  task.weights = call.desc.return_weights == ReturnWeights::kPerHead;
  return task;
}

// Rows of weights as they are where nothing is seen.
void clear_weights(const Problem& p, int64_t b, int64_t h, int64_t first, int64_t end) {
  const int64_t bytes = element_bytes(p.dtype);
  for (int64_t i = first; i < end; ++i) {
    char* row = static_cast<char*>(p.weights) +
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
  const Sequence s = sequence(desc, call.args, b);
  float* columns = desc.return_column_sums ? call.sums(lane) : nullptr;
  const size_t lanes = static_cast<size_t>(call.functions.lanes);
  if (columns != nullptr) std::memset(columns, 0, column_floats(call.functions, desc) * sizeof(float));
  for (int64_t first = 0; first < desc.seqlen_q; first += kTileQueries) {
    ForwardTask task = tile_task(call, s, b, h, first);
    task.columns = columns;
    const int64_t end = std::min(first + kTileQueries, desc.seqlen_q);
    if (task.weights) clear_weights(call.problem, b, h, first, end);
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
  const Sequence s = sequence(desc, call.args, b);
  float* mean = call.sums(lane);
  std::memset(mean, 0, mean_floats(desc) * sizeof(float));
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

size_t weights_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads) {
  return lane_bytes(functions, desc) * static_cast<size_t>(num_threads);
}

void weights_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                     Executor& executor) {
  const Call call{functions, desc, args, problem(desc, args)};
  if (desc.return_column_sums || desc.return_weights == ReturnWeights::kPerHead) {
    run_tasks(executor, desc.batch * desc.num_heads,
              [&](int64_t index, int lane) { run_head(call, index / desc.num_heads, index % desc.num_heads, lane); });
  }
  if (desc.return_weights != ReturnWeights::kMean) return;
  const int64_t tiles = (desc.seqlen_q + kTileQueries - 1) / kTileQueries;
  run_tasks(executor, desc.batch * tiles,
            [&](int64_t index, int lane) { run_mean(call, index / tiles, index % tiles * kTileQueries, lane); });
}

}  // namespace polyhead::cpu
