// How caches and steps of decoding are told to the kernels of decoding.cuh.
#include "cuda/linear_decoding.h"

#include <algorithm>
#include <bit>
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

// How a cache's tensor is moved, `tokens` of it at once; without dims: it has none.
UnitRows unit_rows(const Tensor& t, int64_t tokens) {
  UnitRows rows;
  if (!t.given()) return rows;
  const auto element = static_cast<int64_t>(dtype_size_bytes(t.dtype));
  const auto stride = [&](int dim) { return t.dims[dim] <= 1 ? 0 : t.strides[dim] * element; };
  rows.data = static_cast<char*>(t.data);
  rows.page = stride(0), rows.row = stride(1), rows.head = stride(2), rows.column = stride(3);
  constexpr int64_t kPiece = 16, kBlockBytes = 64;  // of a token
  const auto whole = [&](int64_t bytes) { return bytes % kPiece == 0; };
  const bool in_pieces = rows.column == element && whole(t.dims[3] * element) && whole(rows.page) && whole(rows.row) &&
                         whole(rows.head) && reinterpret_cast<uintptr_t>(t.data) % kPiece == 0;
  const auto fits = [&](int64_t unit) { return tokens * unit <= kMostCopiedBytes; };
  int64_t unit = element;
  if (in_pieces && fits(kPiece)) {
    unit = kPiece;
    rows.column = kPiece;
    rows.units = t.dims[3] * element / kPiece;
  } else {
    while (unit > kLeastStaged && !fits(unit)) unit /= 2;
    rows.parts = static_cast<int>(element / unit);
    rows.units = t.dims[3] * rows.parts;
  }
  rows.unit = static_cast<int>(unit);
  const int64_t staged = std::max<int64_t>(unit, kLeastStaged);
  const int64_t width = std::min(kMostCopiedBytes / (tokens * staged), kBlockBytes / staged);
  rows.width = static_cast<int>(std::bit_floor(static_cast<uint64_t>(width)));  // whole sectors where there is room
  return rows;
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

// A block has some columns of all tokens in shared memory, so that it reads all before it writes one.
Status copy_tokens(const KvCacheDesc& cache, const CopyTokensArgs& args, const Run& run) {
  constexpr int64_t kMostTokens = kMostCopiedBytes / kLeastStaged;
  const int64_t tokens = args.from.dims[0];
  if (tokens > kMostTokens) {
    return {StatusCode::kUnsupported,
            sentence("from has ", tokens, " tokens, cuda_sm80 copies 0 to ", kMostTokens, " in a call")};
  }
  CopyTokensProblem p;
  p.from = integers(args.from), p.to = integers(args.to);
  p.num_slots = cache.num_pages * cache.page_size, p.page_size = cache.page_size;
  p.tokens = static_cast<int>(tokens);
  if (tokens == 0 || p.num_slots == 0) return {};
  MemorySize blocks = 0;
  const Tensor* const tensors[] = {&args.pool.key, &args.pool.value, &args.pool.key_scales, &args.pool.value_scales};
  for (int i = 0; i < 4; ++i) {
    UnitRows& rows = p.tensors[i];
    rows = unit_rows(*tensors[i], tokens);
    const MemorySize of_head = MemorySize(pieces(rows.units, rows.width));
    blocks = blocks + of_head * MemorySize(tensors[i]->dims[2]);
    if (Status status = check_grid(blocks); !status.ok()) return status;
    rows.blocks_of_head = static_cast<unsigned>(of_head.value());
    rows.blocks = static_cast<unsigned>((of_head * MemorySize(tensors[i]->dims[2])).value());
    p.shared_bytes = std::max(p.shared_bytes, p.tokens * rows.width * std::max(rows.unit, kLeastStaged));
  }
  p.blocks = static_cast<unsigned>(blocks.value());
  if (p.blocks == 0) return {};
  return launched(launch_copy_tokens(p, stream_of(run)));
}

Status read_tokens(const KvCacheDesc& cache, const ReadTokensArgs& args, const Run& run) {
  ReadTokensProblem p;
  p.from[0] = cache_rows(cache, args.pool.key, args.pool.key_scales, cache.head_dim, cache.key_group);
  p.from[1] = cache_rows(cache, args.pool.value, args.pool.value_scales, cache.head_dim_v, cache.value_group);
  p.to[0] = rows(args.key), p.to[1] = rows(args.value);
  p.slots = integers(args.slots);
  p.num_slots = cache.num_pages * cache.page_size;
  p.tokens = args.slots.dims[0];
  const MemorySize heads = MemorySize(cache.num_heads_kv) * 2, rows = heads * p.tokens;
  if (Status status = check_grid(std::max(heads, MemorySize(rows.value() / kWarpsOfBlock))); !status.ok())
    return status;
  if (rows.value() == 0) return {};
  p.heads_kv = static_cast<int>(cache.num_heads_kv);
  return launched(launch_read_tokens(p, stream_of(run)));
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
