// Many small heads (at most 16 queries, keys and dims): one head a lane, kLanes of them at once, from scores to O, and
// to returned weights.
//   Q [Sq][D]   K [Sk][D]   V [Sk][Dv]   S, P [Sk] of one query   O [Dv] of one query: every element a vector over heads
#include "cpu/attention/head_lanes.h"
#include "cpu/attention/softmax.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// kLanes consecutive heads, counted b * num_heads + h; lanes behind the last head repeat it.
struct Heads {
  HeadRows query, key, value, out;
  HeadRows logsumexp;     // [1][Sq]
  HeadRows attn_weights;  // [Sq][Sk]
  F sink;                 // -inf: none
  int count;
};

void set_heads(Heads& heads, const Problem& problem, int64_t first, int64_t end) {
  heads.count = end - first < kLanes ? static_cast<int>(end - first) : kLanes;
  set_rows(heads.query, problem.query, problem.num_heads, 1, first, heads.count);
  set_rows(heads.key, problem.key, problem.num_heads, problem.group, first, heads.count);
  set_rows(heads.value, problem.value, problem.num_heads, problem.group, first, heads.count);
  set_rows(heads.out, problem.out, problem.num_heads, 1, first, heads.count);
  if (problem.attn_weights != nullptr) {
    const Operand weights = {problem.attn_weights,     problem.dtype,
                             problem.weights_stride_b, problem.weights_stride_q,
                             problem.weights_stride_h, problem.weights_stride_k};
    set_rows(heads.attn_weights, weights, problem.num_heads, 1, first, heads.count);
  }
  alignas(64) float sinks[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    sinks[lane] = sink_of(problem, (first + (lane < heads.count ? lane : 0)) % problem.num_heads);
  }
  heads.sink = load(sinks);
  if (problem.logsumexp.data == nullptr) return;
  set_rows(heads.logsumexp, row_of(problem.logsumexp), problem.num_heads, 1, first, heads.count);
}

struct RowSums {
  F largest, sum;  // m, l
};

struct TinyMemory {
  F key[kTinySize * kTinySize], value[kTinySize * kTinySize];  // rows of dims, padded to a multiple of 4
  F scores[kTinySize][kTinySize];                              // S, then P
  RowSums row[kTinySize];
  int begin[kTinySize], end[kTinySize];  // keys that each query sees
  F mean[kTinySize][kTinySize];          // sums of the weights [Sq][Sk] over the heads of a lane
  float means[kTinySize * kTile];        // over all of them: [Sk][kTile]
};

// Scores of one query -> weights, not yet divided by their sum. No key in [begin, end) is hidden, so that exp(S - m) is
// NaN where it has to be: S NaN, the largest S infinite.
inline RowSums softmax_keys(F* s, int query, int begin, int end, const Score& score, bool has_sinks, F sink) {
  if (score.scaled_first) {
    Options::Kept kept;
    for (int j = begin; j < end; ++j) s[j] = score.of(s[j], HeadsPlace{query, j}, Options::View{}, kept);
  }
  F m = has_sinks ? maximum(s[begin], sink) : s[begin], l = broadcast(0.0f);
  for (int j = begin + 1; j < end; ++j) m = maximum(s[j], m);
  const F factor = broadcast(score.to_log2);
  if (has_sinks) l = exp2(sink - m, factor);
  for (int j = begin; j < end; ++j) {
    const F p = exp2(s[j] - m, factor);
    l = l + p;
    s[j] = p;
  }
  return {m, l};
}

void score_heads(const Problem& problem, const Heads& heads, int num_queries, TinyMemory& scratch) {
  F q[kTinySize];
  for (int i = 0; i < num_queries; ++i) {
    load_row_of_heads(q, heads.query, i, problem.head_dim);
    multiply_rows(scratch.scores[i], q, scratch.key, problem.head_dim, scratch.begin[i], scratch.end[i]);
  }
}

void softmax_heads(const Score& score, bool has_sinks, F sink, int num_queries, TinyMemory& scratch) {
  for (int i = 0; i < num_queries; ++i) {
    const int begin = scratch.begin[i], end = scratch.end[i];
    const bool hidden = begin >= end;
    scratch.row[i] = hidden ? RowSums{sink, select(equal(sink, sink), broadcast(1.0f), sink)}
                            : softmax_keys(scratch.scores[i], i, begin, end, score, has_sinks, sink);
  }
}

void store_logsumexp(const Score& score, const Heads& heads, int num_queries, const TinyMemory& scratch) {
  const F scale = broadcast(score.to_natural);
  for (int first = 0; first < num_queries; first += 4) {
    F L[4] = {broadcast(0.0f), broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};
    const int n = num_queries - first < 4 ? num_queries - first : 4;
    for (int i = 0; i < n; ++i) L[i] = fma(scratch.row[first + i].largest, scale, log(scratch.row[first + i].sum));
    store_columns_of_heads(heads.logsumexp, first * heads.logsumexp.column_bytes, n, heads.count, L);
  }
}

// O of query i, dims [d, d + kDims).
template <int kDims>
inline void weigh_keys(const Problem& problem, const Heads& heads, int i, int64_t d, const TinyMemory& scratch) {
  const F* p = scratch.scores[i];
  const int64_t stride = padded(problem.head_dim_v);
  F o[kDims];
#pragma GCC unroll 8
  for (int n = 0; n < kDims; ++n) o[n] = broadcast(0.0f);
  for (int j = scratch.begin[i]; j < scratch.end[i]; ++j) {
    const F* value = scratch.value + j * stride + d;
#pragma GCC unroll 8
    for (int n = 0; n < kDims; ++n) o[n] = fma(p[j], value[n], o[n]);
  }
  const F divisor = scratch.row[i].sum, reciprocal = broadcast(1.0f) / divisor;
#pragma GCC unroll 2
  for (int quad = 0; quad < kDims; quad += 4) {
    F columns[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) columns[n] = divide(o[quad + n], divisor, reciprocal);
    const int64_t left = problem.head_dim_v - d - quad;
    if (left <= 0) continue;
    const int64_t at = i * heads.out.row_bytes + (d + quad) * heads.out.column_bytes;
    store_columns_of_heads(heads.out, at, left < 4 ? static_cast<int>(left) : 4, heads.count, columns);
  }
}

void weigh_heads(const Problem& problem, const Heads& heads, int num_queries, const TinyMemory& scratch) {
  const int64_t dim = problem.head_dim_v;
  for (int i = 0; i < num_queries; ++i) {
    int64_t d = 0;
    for (; d + 4 < dim; d += 8) weigh_keys<8>(problem, heads, i, d, scratch);
    if (d < dim) weigh_keys<4>(problem, heads, i, d, scratch);
  }
}

// P / l of query i and key j.
inline F weight(const TinyMemory& scratch, int i, int j) {
  if (j < scratch.begin[i] || j >= scratch.end[i]) return broadcast(0.0f);
  const F divisor = scratch.row[i].sum;
  return divide(scratch.scores[i][j], divisor, broadcast(1.0f) / divisor);
}

void store_weights_of_heads(const Problem& problem, const Heads& heads, int num_queries, const TinyMemory& scratch) {
  const int num_keys = static_cast<int>(problem.seqlen_k);
  for (int i = 0; i < num_queries; ++i) {
    for (int first = 0; first < num_keys; first += 4) {
      F quad[4] = {broadcast(0.0f), broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};
      const int n = num_keys - first < 4 ? num_keys - first : 4;
      for (int k = 0; k < n; ++k) quad[k] = weight(scratch, i, first + k);
      const int64_t at = i * heads.attn_weights.row_bytes + first * heads.attn_weights.column_bytes;
      store_columns_of_heads(heads.attn_weights, at, n, heads.count, quad);
    }
  }
}

void add_to_mean(const Heads& heads, int num_queries, int num_keys, bool first, TinyMemory& scratch) {
  const M there = mask_from_bits((1u << heads.count) - 1);  // the lanes behind repeat a head
  for (int i = 0; i < num_queries; ++i) {
    for (int j = 0; j < num_keys; ++j) {
      const F p = select(there, weight(scratch, i, j), broadcast(0.0f));
      scratch.mean[i][j] = first ? p : scratch.mean[i][j] + p;
    }
  }
}

void store_mean_of_heads(const Problem& problem, int64_t b, int num_queries, TinyMemory& scratch) {
  for (int64_t j = 0; j < problem.seqlen_k; ++j) {
    for (int first = 0; first < num_queries; first += kLanes) {
      F queries[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        queries[i] = first + i < num_queries ? scratch.mean[first + i][j] : broadcast(0.0f);
      }
      store(scratch.means + j * kTile + first, sums(queries));
    }
  }
  store_mean(problem, b, 0, num_queries, scratch.means);
}

}  // namespace

size_t tiny_scratch_bytes() { return sizeof(TinyMemory); }

void tiny_heads(const Problem& problem, const Sequence& sequence, int64_t first, int64_t end, bool mean, void* memory) {
  TinyMemory& scratch = *static_cast<TinyMemory*>(memory);
  const int num_queries = static_cast<int>(sequence.len_q), num_keys = static_cast<int>(sequence.len_k);
  const int64_t begin = first;
  const Score score(problem, sequence, 0, 0);  // the same for all heads
  set_key_ranges(scratch.begin, scratch.end, problem.band, sequence);
  for (; first < end; first += kLanes) {
    Heads heads;
    set_heads(heads, problem, first, end);
    for (int64_t j = 0; j < sequence.len_k; ++j) {
      load_row_of_heads(scratch.key + j * padded(problem.head_dim), heads.key, j, problem.head_dim);
      load_row_of_heads(scratch.value + j * padded(problem.head_dim_v), heads.value, j, problem.head_dim_v);
    }
    score_heads(problem, heads, num_queries, scratch);
    softmax_heads(score, problem.sinks != nullptr, heads.sink, num_queries, scratch);
    if (problem.logsumexp.data != nullptr) store_logsumexp(score, heads, num_queries, scratch);
    weigh_heads(problem, heads, num_queries, scratch);
    if (mean) {
      add_to_mean(heads, num_queries, num_keys, first == begin, scratch);
    } else if (problem.attn_weights != nullptr) {
      store_weights_of_heads(problem, heads, num_queries, scratch);
    }
  }
  if (mean) store_mean_of_heads(problem, begin / problem.num_heads, num_queries, scratch);
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
