#include "cpu/attention/score_gradient_tasks.h"

#include <algorithm>
#include <cstring>

#include "core/dtype.h"
#include "core/threads.h"
#include "cpu/attention/backward_tasks.h"
#include "cpu/attention/call.h"

namespace polyhead::cpu {
namespace {

constexpr size_t kSumsFloats = size_t{kScoreKeys} * kTileQueries;

struct Call {
  const IsaFunctions& functions;
  const AttentionDesc& desc;
  const ForwardArgs& args;
  const Sequences& sequences;
  const BackwardProblem problem;

  MemorySize lane_bytes() const {
    return scratch_bytes(functions.score_scratch_bytes, desc) + program_bytes(desc, true) + kSumsFloats * sizeof(float);
  }
  float* sums(int lane) const {
    return reinterpret_cast<float*>(static_cast<char*>(args.workspace) +
                                    lane_bytes().value() * static_cast<size_t>(lane));
  }
  void* scratch(int lane) const { return sums(lane) + kSumsFloats; }
};

// What one task sums: ranges of batch, heads, tiles of queries and chunks of keys, one or all of each.
struct Range {
  int64_t begin, end;
};
struct Summed {
  Range b, h, tile, chunk;
};

int64_t chunks_of(const AttentionDesc& desc) { return pieces(desc.seqlen_k, kScoreKeys); }

void add_all(const Call& call, const Summed& all, bool distances, int lane) {
  float* sums = call.sums(lane);
  std::memset(sums, 0, kSumsFloats * sizeof(float));
  for (int64_t b = all.b.begin; b < all.b.end; ++b) {
    ScoreTask task;
    task.sequence = call.sequences[b];
    task.b = b;
    task.sums = sums;
    task.distances = distances;
    for (task.h = all.h.begin; task.h < all.h.end; ++task.h) {
      for (int64_t tile = all.tile.begin; tile < all.tile.end; ++tile) {
        task.first_query = tile * kTileQueries;
        if (task.first_query >= task.sequence.len_q) break;
        for (int64_t chunk = all.chunk.begin; chunk < all.chunk.end; ++chunk) {
          task.first_key = chunk * kScoreKeys;
          if (task.first_key >= task.sequence.len_k) break;
          call.functions.add_score_gradients(call.problem, task, call.scratch(lane));
        }
      }
    }
  }
}

void store_element_sum(void* data, DType dtype, int64_t at, double sum, bool accumulate) {
  if (accumulate) sum += load_element(data, dtype, at);
  store_element(data, dtype, at, sum);
}

// The sums of a task, over the queries, the keys or both where the bias broadcasts, to element `at` of the bias and on.
void store_bias(const Call& call, int64_t at, const float* sums, int64_t queries, int64_t keys) {
  const Broadcast& to = call.problem.grad_bias;
  void* data = const_cast<void*>(to.data);
  const bool each_query = call.desc.attn_bias.dims[2] != 1, each_key = call.desc.attn_bias.dims[3] != 1;
  const bool accumulate = call.problem.accumulate;
  if (each_query && each_key) {
    return call.functions.store_score_gradients(to, at, sums, queries, keys, accumulate);
  }
  double total = 0;
  for (int64_t k = 0; k < (each_query ? 0 : keys); ++k) {
    double sum = 0;
    for (int64_t q = 0; q < queries; ++q) sum += double{sums[k * kTileQueries + q]};
    total += sum;
    if (each_key) store_element_sum(data, to.dtype, at + k * to.stride_k, sum, accumulate);
  }
  for (int64_t q = 0; q < (each_query ? queries : 0); ++q) {
    double sum = 0;
    for (int64_t k = 0; k < keys; ++k) sum += double{sums[k * kTileQueries + q]};
    store_element_sum(data, to.dtype, at + q * to.stride_q, sum, accumulate);
  }
  if (!each_query && !each_key) store_element_sum(data, to.dtype, at, total, accumulate);
}

// Task `index` of those that a dim of `count` parts is cut into: one part, or all where it is summed.
Range part(bool each, int64_t index, int64_t count) { return each ? Range{index, index + 1} : Range{0, count}; }

void backward_bias(const Call& call, const Run& run) {
  const AttentionDesc& desc = call.desc;
  const int64_t* dims = desc.attn_bias.dims;
  const bool each_query = dims[2] != 1, each_key = dims[3] != 1;
  const int64_t tiles = each_query ? tiles_of(desc) : 1, chunks = each_key ? chunks_of(desc) : 1;
  run_tasks(run, dims[0] * dims[1] * tiles * chunks, [&](int64_t index, int lane) {
    const int64_t chunk = index % chunks, tile = index / chunks % tiles;
    const int64_t h = index / chunks / tiles % dims[1], b = index / chunks / tiles / dims[1];
    const Summed all{part(dims[0] != 1, b, desc.batch), part(dims[1] != 1, h, desc.num_heads),
                     part(each_query, tile, tiles_of(desc)), part(each_key, chunk, chunks_of(desc))};
    add_all(call, all, false, lane);
    const Broadcast& to = call.problem.grad_bias;
    const int64_t at =
        b * to.stride_b + h * to.stride_h + tile * kTileQueries * to.stride_q + chunk * kScoreKeys * to.stride_k;
    const int64_t queries =
        each_query ? std::min<int64_t>(kTileQueries, desc.seqlen_q - tile * kTileQueries) : int64_t{kTileQueries};
    const int64_t keys =
        each_key ? std::min<int64_t>(kScoreKeys, desc.seqlen_k - chunk * kScoreKeys) : int64_t{kScoreKeys};
    store_bias(call, at, call.sums(lane), queries, keys);
  });
}

void backward_slopes(const Call& call, const Run& run) {
  const AttentionDesc& desc = call.desc;
  const bool each_batch = desc.alibi_slopes_ndim == 2;
  run_tasks(run, (each_batch ? desc.batch : 1) * desc.num_heads, [&](int64_t index, int lane) {
    const int64_t b = index / desc.num_heads, h = index % desc.num_heads;
    // Packed sequences may be as long as all rows; where they end, add_all stops.
    add_all(call, {part(each_batch, b, desc.batch), {h, h + 1}, {0, tiles_of(desc)}, {0, chunks_of(desc)}}, true, lane);
    const float* sums = call.sums(lane);
    double sum = 0;
    for (size_t i = 0; i < kSumsFloats; ++i) sum += double{sums[i]};
    const BackwardProblem& p = call.problem;
    store_element_sum(p.grad_slopes, DType::kFloat32, b * p.grad_slopes_stride_b + h * p.grad_slopes_stride_h, sum,
                      p.accumulate);
  });
}

}  // namespace

MemorySize score_gradients_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads) {
  if (!desc.attn_bias.given && desc.alibi_slopes_ndim == 0) return 0;
  return Call{functions, desc, {}, {}, {}}.lane_bytes() * num_threads;
}

void score_gradients_backward(const IsaFunctions& functions, const AttentionDesc& desc, const BackwardArgs& args,
                              const Sequences& sequences, const Run& run) {
  const bool bias = args.grad_attn_bias.given() && !gives_bias(desc, args);
  if (!bias && !args.grad_alibi_slopes.given()) return;
  const Call call{functions, desc, args.forward, sequences, backward_problem(desc, args)};
  if (bias) backward_bias(call, run);
  if (args.grad_alibi_slopes.given()) backward_slopes(call, run);
}

}  // namespace polyhead::cpu
