// The CPU kernels: which desc they take, how a call is cut into tasks, and what happens to rows that see nothing.
#include "cpu/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/sequences.h"
#include "core/philox.h"
#include "core/threads.h"
#include "cpu/isa.h"
#include "cpu/isa_functions.h"

namespace polyhead {
namespace cpu {
namespace {

Operand operand(const Tensor& t) {
  if (t.ndim == 3) return {t.data, t.dtype, 0, t.strides[0], t.strides[1], t.strides[2]};
  return {t.data, t.dtype, t.strides[0], t.strides[1], t.strides[2], t.strides[3]};
}

Broadcast broadcast(const Tensor& t) {
  if (!t.given()) return {};
  const auto stride = [&](int dim) { return t.dims[dim] == 1 ? 0 : t.strides[dim]; };
  return {t.data, t.dtype, stride(0), stride(1), stride(2), stride(3)};
}

Dropout dropout(const AttentionDesc& desc, const ForwardArgs& args) {
  const double p = desc.dropout_p;
  return {dropout_threshold(p), args.dropout_offset, args.dropout_seed, p < 1 ? static_cast<float>(1 / (1 - p)) : 0.0f};
}

Problem problem(const AttentionDesc& desc, const ForwardArgs& args) {
  Problem p;
  p.batch = desc.batch;
  p.num_heads = desc.num_heads;
  p.group = desc.num_heads / desc.num_heads_kv;
  p.head_dim = desc.head_dim;
  p.head_dim_v = desc.head_dim_v;
  p.dtype = desc.dtype;
  p.query = operand(args.query);
  p.key = operand(args.key);
  p.value = operand(args.value);
  p.out = operand(args.out);
  if (args.logsumexp.given()) {
    const Tensor& l = args.logsumexp;
    const bool packed = l.ndim == 2;
    p.logsumexp = static_cast<float*>(l.data);
    p.logsumexp_stride_b = packed ? 0 : l.strides[0];
    p.logsumexp_stride_h = l.strides[packed ? 0 : 1];
    p.logsumexp_stride_s = l.strides[packed ? 1 : 2];
  }
  p.mask = broadcast(args.attn_mask);
  p.bias = broadcast(args.attn_bias);
  if (args.alibi_slopes.given()) {
    const Tensor& slopes = args.alibi_slopes;
    p.slopes = static_cast<const float*>(slopes.data);
    p.slopes_stride_b = slopes.ndim == 2 ? slopes.strides[0] : 0;
    p.slopes_stride_h = slopes.strides[slopes.ndim - 1];
  }
  p.band = band(desc);
  p.scale = static_cast<float>(desc.scale.value_or(desc.head_dim > 0 ? 1 / std::sqrt(double(desc.head_dim)) : 1.0));
  p.softcap = static_cast<float>(desc.softcap);
  p.dropout = dropout(desc, args);
  return p;
}

// O = 0 and L = -inf for rows [first, end) of one head: padding, or rows behind the last packed sequence.
void hide_rows(const Problem& p, int64_t b, int64_t h, int64_t first, int64_t end) {
  const int64_t element_bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  for (int64_t i = first; i < end; ++i) {
    char* row = static_cast<char*>(p.out.data) + (b * p.out.stride_b + i * p.out.stride_s + h * p.out.stride_h) * element_bytes;
    for (int64_t d = 0; d < p.head_dim_v; ++d) {
      std::memset(row + d * p.out.stride_d * element_bytes, 0, static_cast<size_t>(element_bytes));
    }
    if (p.logsumexp == nullptr) continue;
    p.logsumexp[b * p.logsumexp_stride_b + h * p.logsumexp_stride_h + i * p.logsumexp_stride_s] = -INFINITY;
  }
}

// How many tiles a task holds: more amortise the copying of keys and values, fewer give every thread work. They change
// no bit of the result.
int tiles_per_task(const AttentionDesc& desc, int num_threads) {
  const int64_t tile_bytes = (desc.head_dim + desc.head_dim_v) * kTileQueries * int64_t{sizeof(float)};
  const int64_t cache_bytes = 384 * 1024;  // of a 1 MiB L2: the rest is for keys, values and weights
  const int64_t fitting = std::clamp<int64_t>(cache_bytes / std::max<int64_t>(tile_bytes, 1), 1, kMaxTiles);
  const int64_t tiles = (desc.seqlen_q + kTileQueries - 1) / kTileQueries * desc.batch * desc.num_heads;
  const int64_t spread = std::max<int64_t>(1, tiles / (4 * int64_t{num_threads}));
  return static_cast<int>(std::min(fitting, spread));
}

// Queries of a sequence, padding included, are cut into chunks; first_chunk[b] counts those of the sequences before b.
class Chunks {
 public:
  Chunks(const AttentionDesc& desc, const ForwardArgs& args, int64_t chunk_queries, int64_t* first_chunk)
      : desc_(desc), chunk_queries_(chunk_queries), first_chunk_(first_chunk) {
    if (!desc.packed) return;
    first_chunk[0] = 0;
    for (int64_t b = 0; b < desc.batch; ++b) {
      first_chunk[b + 1] = first_chunk[b] + chunks_of(integer_at(args.cu_seqlens_q, b + 1) - integer_at(args.cu_seqlens_q, b));
    }
  }

  int64_t per_head() const { return desc_.packed ? first_chunk_[desc_.batch] : desc_.batch * chunks_of(desc_.seqlen_q); }
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
  int64_t chunks_of(int64_t queries) const { return (queries + chunk_queries_ - 1) / chunk_queries_; }

  const AttentionDesc& desc_;
  int64_t chunk_queries_;
  int64_t* first_chunk_;  // [batch + 1], only when packed
};

size_t chunk_table_bytes(const AttentionDesc& desc) {
  return desc.packed ? (static_cast<size_t>(desc.batch + 1) * sizeof(int64_t) + 63) / 64 * 64 : 0;
}

template <const IsaFunctions& functions>
size_t workspace_bytes(const AttentionDesc& desc, int num_threads) {
  const int tiles = tiles_per_task(desc, num_threads);
  return chunk_table_bytes(desc) +
         functions.forward_scratch_bytes(desc.head_dim, desc.head_dim_v, tiles) * static_cast<size_t>(num_threads);
}

template <const IsaFunctions& functions>
void forward(const AttentionDesc& desc, const ForwardArgs& args, Executor& executor) {
  const Problem p = problem(desc, args);
  const int tiles = tiles_per_task(desc, executor.num_threads());
  const int64_t chunk_queries = int64_t{tiles} * kTileQueries;
  const Chunks chunks(desc, args, chunk_queries, static_cast<int64_t*>(args.workspace));
  char* scratch = static_cast<char*>(args.workspace) + chunk_table_bytes(desc);
  const size_t scratch_bytes = functions.forward_scratch_bytes(desc.head_dim, desc.head_dim_v, tiles);
  run_tasks(executor, chunks.count(), [&](int64_t index, int lane) {
    const Chunks::At at = chunks.at(index);
    const Sequence s = sequence(desc, args, at.b);
    const int64_t padded = desc.packed ? s.len_q : desc.seqlen_q;
    const int64_t end = std::min(at.first_query + chunk_queries, padded);
    const int64_t computed = std::clamp(s.len_q, at.first_query, end);
    const ForwardTask task{s, at.b, at.h, at.first_query, computed - at.first_query};
    if (task.num_queries > 0) functions.forward_tiles(p, task, scratch + scratch_bytes * static_cast<size_t>(lane));
    hide_rows(p, at.b, at.h, computed, end);
  });
  if (!desc.packed) return;
  for (int64_t h = 0; h < desc.num_heads; ++h) {
    hide_rows(p, 0, h, integer_at(args.cu_seqlens_q, desc.batch), desc.seqlen_q);
  }
}

std::string why_not(const AttentionDesc& desc, bool has_isa, const char* missing) {
  if (!has_isa) return std::string("this CPU has no ") + missing;
  if (desc.dtype == DType::kFloat64) return "dtype is float64, takes float32, bfloat16 or float16";
  if (desc.return_weights != ReturnWeights::kNone) return "return_weights is asked for";
  if (desc.return_column_sums) return "return_column_sums is asked for";
  return "";
}

}  // namespace
}  // namespace cpu

constexpr Kernel kCpuGeneric = {
    "cpu_generic", [](const AttentionDesc& desc) { return cpu::why_not(desc, true, ""); },
    cpu::workspace_bytes<cpu::generic::kFunctions>, cpu::forward<cpu::generic::kFunctions>};
#if defined(__x86_64__)
constexpr Kernel kCpuAvx2 = {
    "cpu_avx2", [](const AttentionDesc& desc) { return cpu::why_not(desc, cpu::isa().avx2, "AVX2 with FMA and F16C"); },
    cpu::workspace_bytes<cpu::avx2::kFunctions>, cpu::forward<cpu::avx2::kFunctions>};
constexpr Kernel kCpuAvx512 = {
    "cpu_avx512", [](const AttentionDesc& desc) { return cpu::why_not(desc, cpu::isa().avx512, "AVX-512 (F, BW, DQ, VL)"); },
    cpu::workspace_bytes<cpu::avx512::kFunctions>, cpu::forward<cpu::avx512::kFunctions>};
constexpr Kernel kCpuAvx512Bf16 = {
    "cpu_avx512bf16",
    [](const AttentionDesc& desc) { return cpu::why_not(desc, cpu::isa().avx512bf16, "AVX512_BF16"); },
    cpu::workspace_bytes<cpu::avx512bf16::kFunctions>, cpu::forward<cpu::avx512bf16::kFunctions>};
#endif

}  // namespace polyhead
