// How caches and steps of decoding are told to the kernels of decoding.cuh.
#include "cuda/linear_decoding.h"

#include <algorithm>
#include <cmath>

#include "core/dtype.h"
#include "core/sentence.h"
#include "cuda/call.h"
#include "cuda/linear_call.h"
#include "cuda/linear_launch.h"

namespace polyhead::cuda {
namespace {

constexpr int kWarpsOfBlock = kBlockThreads / 32;

Status check_cache(const KvCacheDesc& cache) {
  for (const auto& [name, dim] : {std::pair("head_dim", cache.head_dim), std::pair("head_dim_v", cache.head_dim_v)}) {
    if (dim <= kMostHeadDim) continue;
    return {StatusCode::kUnsupported, sentence(name, " is ", dim, ", cuda_sm80 takes caches of 0 to ", kMostHeadDim)};
  }
  return {};
}

TokenNumbers token_numbers(const Tensor& t) {
  if (!t.given()) return {};
  return {t.data, t.strides[0], t.strides[1], t.dtype == DType::kInt64};
}
AngleTable angle_table(const Tensor& t) {
  if (!t.given()) return {};
  return {static_cast<const float*>(t.data), t.strides[0], t.strides[1]};
}

Rows rows(const Tensor& t) { return rows_of(t, number_of(t.dtype)); }

CacheRows cache_rows(const KvCacheDesc& cache, const Tensor& t, const Tensor& scales, int64_t dim, int64_t group) {
  CacheRows to;
  static_cast<StoredRows&>(to) = stored_rows(t, scales, group == 0 ? dim : group);
  to.page_size = cache.page_size;
  to.dim = static_cast<int>(dim);
  to.largest = largest_stored(t.dtype);
  return to;
}

}  // namespace

Status append(const KvCacheDesc& cache, const AppendArgs& args, const Run& run) {
  if (Status status = check_cache(cache); !status.ok()) return status;
  const Tensor& tokens = args.key.given() ? args.key : args.query;
  AppendProblem p;
  p.batch = tokens.dims[0], p.time = tokens.dims[1];
  if (args.query.given()) p.heads = static_cast<int>(args.query.dims[2]);
  if (args.key.given()) p.heads_kv = static_cast<int>(cache.num_heads_kv);
  p.query = rows(args.query), p.query_out = rows(args.query_out);
  p.key = rows(args.key), p.value = rows(args.value);
  p.to_key = cache_rows(cache, args.pool.key, args.pool.key_scales, cache.head_dim, cache.key_group);
  p.to_value = cache_rows(cache, args.pool.value, args.pool.value_scales, cache.head_dim_v, cache.value_group);
  p.num_slots = cache.num_pages * cache.page_size;
  p.slots = token_numbers(args.slots), p.positions = token_numbers(args.positions);
  p.lengths = integers(args.lengths);
  p.cos = angle_table(args.cos), p.sin = angle_table(args.sin);
  if (args.positions.given()) p.num_positions = args.cos.dims[0];
  p.pairs = static_cast<int>(cache.rotary_dim / 2);
  p.interleaved = cache.interleaved, p.hadamard = cache.hadamard;
  p.hadamard_factor = 1 / std::sqrt(static_cast<float>(std::max<int64_t>(cache.head_dim, 1)));
  const MemorySize heads = MemorySize(args.query.given() ? args.query.dims[2] : 0) +
                           MemorySize(args.key.given() ? cache.num_heads_kv : 0) * 2;
  const MemorySize rows = MemorySize(p.batch) * MemorySize(p.time) * heads;
  if (Status status = check_grid(std::max(heads, MemorySize(rows.value() / kWarpsOfBlock))); !status.ok())
    return status;
  if (rows.value() == 0) return {};
  return launched(launch_append(p, stream_of(run)));
}

Status stand_at_step(const AttentionDesc& asked, const StepArgs& args, const Run& run) {
  StepProblem p;
  p.seqlens_q = integers(args.seqlens_q), p.seqlens_k = integers(args.seqlens_k);
  p.query_offsets = integers(args.query_offsets);
  p.batch = asked.batch, p.seqlen_q = asked.seqlen_q, p.seqlen_k = asked.seqlen_k;
  p.diagonal = diagonal_of(asked);
  p.offset = asked.query_offset.value_or(0);
  p.step = args.step, p.joins = args.joins, p.to = args.to;
  if (p.batch == 0) return {};
  return launched(launch_step(p, stream_of(run)));
}

}  // namespace polyhead::cuda
