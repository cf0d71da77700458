// Many small heads (at most 16 queries, keys and dims): one head a lane, kLanes of them at once, from scores to O.
//   Q [Sq][D]   K [Sk][D]   V [Sk][Dv]   S, P [Sk] of one query   O [Dv] of one query: every element a vector over heads
#include "cpu/isa_functions.h"
#include "cpu/rows.h"
#include "cpu/softmax.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int64_t padded(int64_t dim) { return (dim + 3) / 4 * 4; }

// A matrix [rows][columns] of each of kLanes heads.
struct HeadRows {
  char* lane[kLanes];
  int64_t row_bytes, column_bytes;
  DType dtype;
};

// kLanes consecutive heads, counted b * num_heads + h; lanes behind the last head repeat it.
struct Heads {
  HeadRows query, key, value, out;
  HeadRows logsumexp;  // [1][Sq]
  int count;
};

int64_t element_bytes(const Operand& x) { return x.dtype == DType::kFloat32 ? 4 : 2; }

char* head_address(const Operand& x, int64_t b, int64_t h) {
  return static_cast<char*>(x.data) + (b * x.stride_b + h * x.stride_h) * element_bytes(x);
}

// The lanes of one operand, of which each head is read by `group` query heads.
void set_rows(HeadRows& rows, const Operand& x, const Problem& problem, int64_t group, int64_t first, int count) {
  rows.row_bytes = x.stride_s * element_bytes(x);
  rows.column_bytes = x.stride_d * element_bytes(x);
  rows.dtype = x.dtype;
  const int64_t head_bytes = x.stride_h * element_bytes(x);
  int64_t b = first / problem.num_heads, h = first % problem.num_heads, in_group = h % group;
  char* head = head_address(x, b, h / group);
  for (int lane = 0; lane < kLanes; ++lane) {
    rows.lane[lane] = head;
    if (lane + 1 >= count) continue;
    if (++h == problem.num_heads) {
      h = in_group = 0;
      head = head_address(x, ++b, 0);
    } else if (++in_group == group) {
      in_group = 0;
      head += head_bytes;
    }
  }
}

void set_heads(Heads& heads, const Problem& problem, int64_t first, int64_t end) {
  heads.count = end - first < kLanes ? static_cast<int>(end - first) : kLanes;
  set_rows(heads.query, problem.query, problem, 1, first, heads.count);
  set_rows(heads.key, problem.key, problem, problem.group, first, heads.count);
  set_rows(heads.value, problem.value, problem, problem.group, first, heads.count);
  set_rows(heads.out, problem.out, problem, 1, first, heads.count);
  const Statistic& l = problem.logsumexp;
  if (l.data == nullptr) return;
  const Operand logsumexp{l.data, DType::kFloat32, l.stride_b, 0, l.stride_h, l.stride_s};
  set_rows(heads.logsumexp, logsumexp, problem, 1, first, heads.count);
}

inline const float* float_at(const char* p) { return reinterpret_cast<const float*>(p); }

// n <= 4 elements at byte offset `at` of every head: out[d], the lanes of d >= n are 0.
inline void load_columns_of_heads(F (&out)[4], const HeadRows& x, int64_t at, int n) {
  if (x.dtype == DType::kFloat32 && x.column_bytes == 4 && n == 4) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const float* quad[kLanes / 4];
#pragma GCC unroll 4
      for (int q = 0; q < kLanes / 4; ++q) quad[q] = float_at(x.lane[4 * q + j] + at);
      out[j] = load_quads(quad);
    }
  } else if (x.dtype == DType::kFloat32) {
    alignas(64) float buffer[4][kLanes] = {};
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int d = 0; d < n; ++d)
        __builtin_memcpy(&buffer[lane % 4][lane / 4 * 4 + d], x.lane[lane] + at + d * x.column_bytes, sizeof(float));
    }
    for (int j = 0; j < 4; ++j) out[j] = load(buffer[j]);
  } else {
    alignas(64) uint16_t buffer[4][kLanes] = {};
    for (int lane = 0; lane < kLanes; ++lane) {
      uint16_t* quad = &buffer[lane % 4][lane / 4 * 4];
      if (n == 4 && x.column_bytes == 2) {
        __builtin_memcpy(quad, x.lane[lane] + at, 4 * sizeof(uint16_t));
      } else {
        for (int d = 0; d < n; ++d)
          __builtin_memcpy(quad + d, x.lane[lane] + at + d * x.column_bytes, sizeof(uint16_t));
      }
    }
    for (int j = 0; j < 4; ++j) out[j] = x.dtype == DType::kBFloat16 ? load_bf16(buffer[j]) : load_f16(buffer[j]);
  }
  transpose_quads(out);
}

// Row `row` of every head: out[dim, padded by zeros to a multiple of 4].
inline void load_row_of_heads(F* out, const HeadRows& x, int64_t row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 4) {
    F quad[4];
    const int n = dim - d < 4 ? static_cast<int>(dim - d) : 4;
    load_columns_of_heads(quad, x, row * x.row_bytes + d * x.column_bytes, n);
    for (int i = 0; i < 4; ++i) out[d + i] = quad[i];
  }
}

// The other way, to the heads that are there.
inline void store_columns_of_heads(const HeadRows& x, int64_t at, int n, int count, F (&in)[4]) {
  transpose_quads(in);
  if (x.dtype == DType::kFloat32 && x.column_bytes == 4 && n == 4 && count == kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      float* quad[kLanes / 4];
#pragma GCC unroll 4
      for (int q = 0; q < kLanes / 4; ++q) quad[q] = reinterpret_cast<float*>(x.lane[4 * q + j] + at);
      store_quads(quad, in[j]);
    }
    return;
  }
  alignas(64) float floats[4][kLanes];
  alignas(64) uint16_t halves[4][kLanes];
  const int64_t element_bytes = x.dtype == DType::kFloat32 ? 4 : 2;
  for (int j = 0; j < 4; ++j) {
    if (x.dtype == DType::kFloat32) {
      store(floats[j], in[j]);
    } else if (x.dtype == DType::kBFloat16) {
      store_bf16(halves[j], in[j]);
    } else {
      store_f16(halves[j], in[j]);
    }
  }
  for (int lane = 0; lane < count; ++lane) {
    for (int d = 0; d < n; ++d) {
      char* target = x.lane[lane] + at + d * x.column_bytes;
      const int column = lane / 4 * 4 + d;
      if (element_bytes == 4) {
        __builtin_memcpy(target, &floats[lane % 4][column], 4);
      } else {
        __builtin_memcpy(target, &halves[lane % 4][column], 2);
      }
    }
  }
}

struct RowSums {
  F largest, sum;  // m, l
};

struct Scratch {
  F key[kTinySize * kTinySize], value[kTinySize * kTinySize];  // rows of dims, padded to a multiple of 4
  F scores[kTinySize][kTinySize];                              // S, then P
  RowSums row[kTinySize];
  int begin[kTinySize], end[kTinySize];  // keys that each query sees
};

// S of one query, dims in order.
template <int kDims>
inline void score_keys(F* s, const F* query, const Scratch& scratch, int begin, int end) {
  F q[kDims];
#pragma GCC unroll 16
  for (int d = 0; d < kDims; ++d) q[d] = query[d];
  for (int j = begin; j < end; ++j) {
    F sum = q[0] * scratch.key[j * kDims];
#pragma GCC unroll 16
    for (int d = 1; d < kDims; ++d) sum = fma(q[d], scratch.key[j * kDims + d], sum);
    s[j] = sum;
  }
}

// Scores of one query -> weights, not yet divided by their sum. No key in [begin, end) is hidden, so that exp(S - m) is
// NaN where it has to be: S NaN, the largest S infinite.
inline RowSums softmax_keys(F* s, int begin, int end, const ScoreRule& rule) {
  if (rule.natural) {
    for (int j = begin; j < end; ++j) {
      s[j] = s[j] * broadcast(rule.scale);
      if (rule.softcap > 0) s[j] = broadcast(rule.softcap) * tanh(s[j] / broadcast(rule.softcap));
    }
  }
  F m = s[begin], l = broadcast(0.0f);
  for (int j = begin + 1; j < end; ++j) m = maximum(s[j], m);
  const F factor = broadcast(rule.factor);
  for (int j = begin; j < end; ++j) {
    const F p = exp2(s[j] - m, factor);
    l = l + p;
    s[j] = p;
  }
  return {m, l};
}

void score_heads(const Problem& problem, const Heads& heads, int num_queries, Scratch& scratch) {
  F q[kTinySize];
  for (int i = 0; i < num_queries; ++i) {
    load_row_of_heads(q, heads.query, i, problem.head_dim);
    F* s = scratch.scores[i];
    const int begin = scratch.begin[i], end = scratch.end[i];
    switch ((problem.head_dim + 3) / 4) {
      case 1: score_keys<4>(s, q, scratch, begin, end); break;
      case 2: score_keys<8>(s, q, scratch, begin, end); break;
      case 3: score_keys<12>(s, q, scratch, begin, end); break;
      default: score_keys<16>(s, q, scratch, begin, end); break;
    }
  }
}

void softmax_heads(const Problem& problem, int num_queries, Scratch& scratch) {
  const ScoreRule rule = score_rule(problem, 0, 0);
  for (int i = 0; i < num_queries; ++i) {
    const int begin = scratch.begin[i], end = scratch.end[i];
    const bool hidden = begin >= end;
    scratch.row[i] =
        hidden ? RowSums{broadcast(-kInfinity), broadcast(1.0f)} : softmax_keys(scratch.scores[i], begin, end, rule);
  }
}

void store_logsumexp(const Problem& problem, const Heads& heads, int num_queries, const Scratch& scratch) {
  const ScoreRule rule = score_rule(problem, 0, 0);
  const F scale = broadcast(rule.natural ? 1.0f : rule.scale);
  for (int first = 0; first < num_queries; first += 4) {
    F L[4] = {broadcast(0.0f), broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};
    const int n = num_queries - first < 4 ? num_queries - first : 4;
    for (int i = 0; i < n; ++i) L[i] = fma(scratch.row[first + i].largest, scale, log(scratch.row[first + i].sum));
    store_columns_of_heads(heads.logsumexp, first * heads.logsumexp.column_bytes, n, heads.count, L);
  }
}

// O of query i, dims [d, d + kDims).
template <int kDims>
inline void weigh_keys(const Problem& problem, const Heads& heads, int i, int64_t d, const Scratch& scratch) {
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

void weigh_heads(const Problem& problem, const Heads& heads, int num_queries, const Scratch& scratch) {
  const int64_t dim = problem.head_dim_v;
  for (int i = 0; i < num_queries; ++i) {
    int64_t d = 0;
    for (; d + 4 < dim; d += 8) weigh_keys<8>(problem, heads, i, d, scratch);
    if (d < dim) weigh_keys<4>(problem, heads, i, d, scratch);
  }
}

}  // namespace

size_t tiny_scratch_bytes() { return sizeof(Scratch); }

void tiny_heads(const Problem& problem, const Sequence& sequence, int64_t first, int64_t end, void* memory) {
  Scratch& scratch = *static_cast<Scratch*>(memory);
  const int num_queries = static_cast<int>(sequence.len_q);
  for (int i = 0; i < num_queries; ++i) {
    const KeyRange range = key_range(problem.band, sequence, i);
    scratch.end[i] = static_cast<int>(range.end);
    scratch.begin[i] = range.begin < range.end ? static_cast<int>(range.begin) : scratch.end[i];
  }
  for (; first < end; first += kLanes) {
    Heads heads;
    set_heads(heads, problem, first, end);
    for (int64_t j = 0; j < sequence.len_k; ++j) {
      load_row_of_heads(scratch.key + j * padded(problem.head_dim), heads.key, j, problem.head_dim);
      load_row_of_heads(scratch.value + j * padded(problem.head_dim_v), heads.value, j, problem.head_dim_v);
    }
    score_heads(problem, heads, num_queries, scratch);
    softmax_heads(problem, num_queries, scratch);
    if (problem.logsumexp.data != nullptr) store_logsumexp(problem, heads, num_queries, scratch);
    weigh_heads(problem, heads, num_queries, scratch);
  }
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
