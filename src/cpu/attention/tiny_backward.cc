// Backward of many small heads: one key/value head a lane, kLanes of them at once, 4 queries after the other.
//   Q, dQ [4][D]   dO, O [4][Dv]   S, P, dP, dS [4][Sk]   K, dK [Sk][D]   V, dV [Sk][Dv]: every element a vector
#include "cpu/attention/head_lanes.h"
#include "cpu/attention/score/policy.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// A matrix of vectors over heads, as an operand of `multiply`: element (row or column r, unit u) of the summed axis.
struct Factor {
  const F* data;
  int64_t stride, unit_stride;

  Factor from(int64_t first, int64_t unit) const {
    return {data + first * stride + unit * unit_stride, stride, unit_stride};
  }
};

constexpr int kHeadRows = 4;  // of a block of `multiply`, which kHeadColumns divides
constexpr int kHeadColumns = kRegisters == 32 ? 4 : 2;

// out[r][c] = (what it holds, or 0) + sum over the units, in order, of a[r][u] b[c][u], for kRows rows and whole blocks of
// kHeadRows columns.
template <int kRows>
inline void multiply(F* out, int64_t out_stride, bool add, const Factor& a, const Factor& b, int64_t columns,
                     int64_t units) {
  for (int64_t c = 0; c < columns; c += kHeadColumns) {
    F sum[kRows][kHeadColumns];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < kHeadColumns; ++n) sum[r][n] = add ? out[r * out_stride + c + n] : broadcast(0.0f);
    }
    for (int64_t u = 0; u < units; ++u) {
      F a_u[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) a_u[r] = a.data[r * a.stride + u * a.unit_stride];
#pragma GCC unroll 4
      for (int n = 0; n < kHeadColumns; ++n) {
        const F b_u = b.data[(c + n) * b.stride + u * b.unit_stride];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r][n] = fma(a_u[r], b_u, sum[r][n]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < kHeadColumns; ++n) out[r * out_stride + c + n] = sum[r][n];
    }
  }
}

// A block of kHeadRows queries at most, and keys: those that some of them see, from a multiple of kHeadRows on; those that
// all of them see; of these, whole blocks of kHeadRows, the last of which may pass the last key.
struct QueryBlock {
  int first, count;
  int begin, end;
  int all_begin, all_end;
  int whole_begin, whole_end;
};

inline QueryBlock query_block(const int* begin, const int* end, int first, int num_queries, int num_keys) {
  QueryBlock x{first, num_queries - first < kHeadRows ? num_queries - first : kHeadRows, num_keys, 0, 0, num_keys, 0,
               0};
  for (int i = first; i < first + x.count; ++i) {
    if (begin[i] < x.begin) x.begin = begin[i];
    if (end[i] > x.end) x.end = end[i];
    if (begin[i] > x.all_begin) x.all_begin = begin[i];
    if (end[i] < x.all_end) x.all_end = end[i];
  }
  x.begin = x.begin / kHeadRows * kHeadRows;
  x.whole_begin = (x.all_begin + kHeadRows - 1) / kHeadRows * kHeadRows;
  x.whole_end = (x.all_end == num_keys ? x.all_end + kHeadRows - 1 : x.all_end) / kHeadRows * kHeadRows;
  return x;
}

// out[i][d] = sum over the keys that query i of a block sees of weights[i][key] rows[key][d], for `dim` dims, padded.
inline void weigh_rows(F* out, const F* weights, const F* rows, int64_t dim, const QueryBlock& block, const int* begin,
                       const int* end) {
  const Factor a{weights, kTinySize, 1}, b{rows, 1, padded(dim)};
  const auto add_keys = [&](int i, bool add, int first, int last) {
    multiply<1>(out + i * kTinySize, kTinySize, add, a.from(i, first), b.from(0, first), padded(dim), last - first);
  };
  const int *begins = begin + block.first, *ends = end + block.first;
  const bool some_for_all = block.all_begin < block.all_end;
  bool more_before = false;
  for (int i = 0; i < block.count; ++i) more_before = more_before || begins[i] < block.all_begin;
  for (int i = 0; i < block.count && (more_before || !some_for_all); ++i) {
    add_keys(i, false, begins[i], some_for_all ? block.all_begin : ends[i]);
  }
  if (!some_for_all) return;
  multiply<kHeadRows>(out, kTinySize, more_before, a.from(0, block.all_begin), b.from(0, block.all_begin), padded(dim),
                      block.all_end - block.all_begin);
  for (int i = 0; i < block.count; ++i) {
    if (ends[i] > block.all_end) add_keys(i, true, block.all_end, ends[i]);
  }
}

// Rows of about a line of the cache are worth asking for; shorter ones lie close together, and hardware follows them.
inline bool worth_asking(const Problem& problem) { return problem.head_dim * element_bytes(problem.dtype) >= 32; }

// Asks for rows [first, end) of every head.
inline void prefetch_rows_of_heads(const HeadRows& x, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; ++row) {
    uintptr_t asked = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      const char* p = x.lane[lane] + row * x.row_bytes;
      const uintptr_t line = reinterpret_cast<uintptr_t>(p) / 64;
      if (line != asked) __builtin_prefetch(p, 0, 2);
      asked = line;
    }
  }
}

constexpr int kMatrix = kTinySize * kTinySize, kQueries = kHeadRows * kTinySize;

struct TinyGradientMemory {
  F key[kMatrix], value[kMatrix], grad_key[kMatrix], grad_value[kMatrix];  // rows of dims, padded to a multiple of 4
  F query[kQueries], grad_query[kQueries], grad_out[kQueries], out[kTinySize];
  F scores[kQueries], grad_scores[kQueries];
  F logsumexp[kTinySize], delta[kTinySize];  // of each query
  int begin[kTinySize], end[kTinySize];      // keys that each query sees
};

// What kLanes key/value heads read and write; the query side is that of one query head of each group.
struct Heads {
  HeadRows query, out, grad_out, grad_query, logsumexp, delta, grad_logsumexp;
  HeadRows key, value, grad_key, grad_value;
  int count;
};

// Head r of every group.
Operand of_group(const Operand& x, int64_t group, int64_t r) {
  Operand heads = x;
  heads.data = static_cast<char*>(x.data) + r * x.stride_h * element_bytes(x.dtype);
  heads.stride_h = x.stride_h * group;
  return heads;
}

void set_keys(Heads& heads, const BackwardProblem& problem, int64_t heads_kv, int64_t first, int64_t end) {
  heads.count = end - first < kLanes ? static_cast<int>(end - first) : kLanes;
  const auto set = [&](HeadRows& rows, const Operand& x) {
    if (x.data != nullptr) set_rows(rows, x, heads_kv, 1, first, heads.count);
  };
  set(heads.key, problem.forward.key);
  set(heads.value, problem.forward.value);
  set(heads.grad_key, problem.grad_key);
  set(heads.grad_value, problem.grad_value);
}

void set_queries(Heads& heads, const BackwardProblem& problem, int64_t heads_kv, int64_t first, int64_t r) {
  const auto set = [&](HeadRows& rows, const Operand& x) {
    if (x.data == nullptr) return;
    set_rows(rows, of_group(x, problem.forward.group, r), heads_kv, 1, first, heads.count);
  };
  set(heads.query, problem.forward.query);
  set(heads.out, problem.forward.out);
  set(heads.grad_out, problem.grad_out);
  set(heads.grad_query, problem.grad_query);
  set(heads.logsumexp, row_of(problem.forward.logsumexp));
  set(heads.delta, row_of(problem.delta));
  set(heads.grad_logsumexp, row_of(problem.grad_logsumexp));
}

// Of the heads that come next, the rows of query block `first` and, with the last block, what is left of the keys.
void look_ahead(const BackwardProblem& problem, const Heads& next, const Sequence& sequence, int64_t first) {
  const bool last = first + kHeadRows >= sequence.len_q;
  const int64_t end_q = last ? sequence.len_q : first + kHeadRows;
  const int64_t end_k = last || end_q > sequence.len_k ? sequence.len_k : end_q;
  const auto ask = [&](const HeadRows& x, const Operand& given, int64_t end) {
    if (given.data != nullptr) prefetch_rows_of_heads(x, first, end);
  };
  ask(next.query, problem.forward.query, end_q);
  ask(next.out, problem.forward.out, end_q);
  ask(next.grad_out, problem.grad_out, end_q);
  ask(next.grad_query, problem.grad_query, end_q);
  ask(next.key, problem.forward.key, end_k);
  ask(next.value, problem.forward.value, end_k);
  ask(next.grad_key, problem.grad_key, end_k);
  ask(next.grad_value, problem.grad_value, end_k);
}

// One number a query, of every head.
void load_statistic(F* out, const HeadRows& x, int num_queries) {
  for (int first = 0; first < num_queries; first += 4) {
    F quad[4];
    const int n = num_queries - first < 4 ? num_queries - first : 4;
    load_columns_of_heads(quad, x, first * x.column_bytes, n);
    for (int i = 0; i < n; ++i) out[first + i] = quad[i];
  }
}

// Rows of kLanes floats, as whole vectors.
__attribute__((noinline)) void store_lines(const HeadRows& x, int64_t row, const F* in, float factor, bool accumulate) {
  F square[kLanes];
  for (int d = 0; d < kLanes; ++d) square[d] = fma(in[d], broadcast(factor), broadcast(0.0f));
  transpose(square);
  for (int lane = 0; lane < kLanes; ++lane) {
    float* to = reinterpret_cast<float*>(x.lane[lane] + row * x.row_bytes);
    store(to, accumulate ? square[lane] + load(to) : square[lane]);
  }
}

void store_row_of_heads(const Heads& heads, const HeadRows& x, int64_t row, int64_t dim, const F* in, float factor,
                        bool accumulate) {
  if (dim == kLanes && heads.count == kLanes && x.dtype == DType::kFloat32 && x.column_bytes == sizeof(float)) {
    return store_lines(x, row, in, factor, accumulate);
  }
  for (int64_t d = 0; d < dim; d += 4) {
    const int n = dim - d < 4 ? static_cast<int>(dim - d) : 4;
    const int64_t at = row * x.row_bytes + d * x.column_bytes;
    F quad[4], before[4];
    for (int i = 0; i < 4; ++i) quad[i] = fma(in[d + i], broadcast(factor), broadcast(0.0f));  // 0 stays +0
    if (accumulate) {
      load_columns_of_heads(before, x, at, n);
      for (int i = 0; i < 4; ++i) quad[i] = quad[i] + before[i];
    }
    store_columns_of_heads(x, at, n, heads.count, quad);
  }
}

// sums[key] += sum over the queries of a block that see the key of weights[query][key] rows[query].
void add_rows(F* sums, const F* weights, const F* rows, int64_t dim, const QueryBlock& block, const int* begin,
              const int* end) {
  const int64_t stride = padded(dim);
  const Factor a{weights, 1, kTinySize}, b{rows, 1, kTinySize};
  for (int j = block.whole_begin; j < block.whole_end; j += kHeadRows) {
    multiply<kHeadRows>(sums + j * stride, stride, true, a.from(j, 0), b, stride, block.count);
  }
  for (int i = 0; i < block.count; ++i) {
    for (int j = begin[block.first + i]; j < end[block.first + i]; ++j) {
      if (j >= block.whole_begin && j < block.whole_end) continue;
      multiply<1>(sums + j * stride, stride, true, a.from(j, i), b.from(0, i), stride, 1);
    }
  }
}

// P and dS of query i from its products with keys and values.
void differentiate(const Score& score, TinyGradientMemory& x, int i, F* scores, F* grad_scores) {
  const F L = x.logsumexp[i], delta = x.delta[i];
  for (int j = x.begin[i]; j < x.end[i]; ++j) {
    const HeadsPlace at{i, j};
    const Options::View view;
    Options::Kept kept;
    const F s = score.of(scores[j], at, view, kept);
    scores[j] = exp_of_weight(fms(s, broadcast(score.to_natural), L));
    const F ds = scores[j] * (grad_scores[j] - delta);
    grad_scores[j] = score.scaled_first ? score.options.raw_gradient(ds, at, view, kept) : ds;
  }
}

// The rows of a block of queries, and their delta.
void load_block(const BackwardProblem& gradients, const Heads& heads, const QueryBlock& block, TinyGradientMemory& x) {
  const int64_t dim = gradients.forward.head_dim, dim_v = gradients.forward.head_dim_v;
  for (int i = 0; i < block.count; ++i) {
    const int row = block.first + i;
    F* grad_out = x.grad_out + i * kTinySize;
    load_row_of_heads(x.query + i * kTinySize, heads.query, row, dim);
    load_row_of_heads(grad_out, heads.grad_out, row, dim_v);
    if (gradients.delta.data != nullptr) continue;
    load_row_of_heads(x.out, heads.out, row, dim_v);
    F delta = broadcast(0.0f);
    for (int64_t d = 0; d < dim_v; ++d) delta = fma(grad_out[d], x.out[d], delta);  // in the order of dP
    x.delta[row] = delta;
  }
  if (gradients.grad_logsumexp.data == nullptr) return;
  F grad[kTinySize];
  load_statistic(grad, heads.grad_logsumexp, block.first + block.count);
  for (int row = block.first; row < block.first + block.count; ++row) x.delta[row] = x.delta[row] - grad[row];
}

void backward_block(const BackwardProblem& gradients, const Heads& heads, const Score& score, const QueryBlock& block,
                    TinyGradientMemory& x) {
  const Problem& problem = gradients.forward;
  const int64_t dim = problem.head_dim, dim_v = problem.head_dim_v;
  const bool wants_query = gradients.grad_query.data != nullptr, wants_key = gradients.grad_key.data != nullptr;
  load_block(gradients, heads, block, x);
  const auto products = [&](F* out, const F* rows, const F* keys, int64_t columns) {
    multiply<kHeadRows>(out + block.begin, kTinySize, false, Factor{rows, kTinySize, 1},
                        Factor{keys, padded(columns), 1}.from(block.begin, 0), block.end - block.begin, columns);
  };
  products(x.scores, x.query, x.key, dim);
  if (wants_query || wants_key) products(x.grad_scores, x.grad_out, x.value, dim_v);
  for (int i = 0; i < block.count; ++i) {
    differentiate(score, x, block.first + i, x.scores + i * kTinySize, x.grad_scores + i * kTinySize);
  }
  if (gradients.grad_value.data != nullptr) {
    add_rows(x.grad_value, x.scores, x.grad_out, dim_v, block, x.begin, x.end);
  }
  if (wants_key) add_rows(x.grad_key, x.grad_scores, x.query, dim, block, x.begin, x.end);
  if (!wants_query) return;
  weigh_rows(x.grad_query, x.grad_scores, x.key, dim, block, x.begin, x.end);
  for (int i = 0; i < block.count; ++i) {
    store_row_of_heads(heads, heads.grad_query, block.first + i, dim, x.grad_query + i * kTinySize, problem.scale,
                       gradients.accumulate);
  }
}

}  // namespace

size_t tiny_backward_scratch_bytes() { return (sizeof(TinyGradientMemory) + 63) / 64 * 64; }

void tiny_backward_heads(const BackwardProblem& gradients, const Sequence& sequence, int64_t first, int64_t end,
                         void* memory) {
  const Problem& problem = gradients.forward;
  const int64_t heads_kv = problem.num_heads / problem.group, dim = problem.head_dim, dim_v = problem.head_dim_v;
  const int num_queries = static_cast<int>(sequence.len_q);
  const Score score(problem, sequence, 0, 0);  // the same for all heads
  TinyGradientMemory& x = *static_cast<TinyGradientMemory*>(memory);
  set_key_ranges(x.begin, x.end, problem.band, sequence);
  const int64_t all_heads = worth_asking(problem) ? problem.batch * heads_kv : 0;
  for (; first < end; first += kLanes) {
    Heads heads, next;
    set_keys(heads, gradients, heads_kv, first, end);
    const bool more = first + kLanes < all_heads;  // probably this thread's next, if they are of another task
    if (more) {
      set_keys(next, gradients, heads_kv, first + kLanes, first + kLanes < end ? end : all_heads);
      set_queries(next, gradients, heads_kv, first + kLanes, 0);
    }
    for (int64_t j = 0; j < sequence.len_k; ++j) {
      load_row_of_heads(x.key + j * padded(dim), heads.key, j, dim);
      load_row_of_heads(x.value + j * padded(dim_v), heads.value, j, dim_v);
    }
    for (int64_t n = 0; n < sequence.len_k * padded(dim); ++n) x.grad_key[n] = broadcast(0.0f);
    for (int64_t n = 0; n < sequence.len_k * padded(dim_v); ++n) x.grad_value[n] = broadcast(0.0f);
    for (int64_t r = 0; r < problem.group; ++r) {
      set_queries(heads, gradients, heads_kv, first, r);
      load_statistic(x.logsumexp, heads.logsumexp, num_queries);
      if (gradients.delta.data != nullptr) load_statistic(x.delta, heads.delta, num_queries);
      for (int i = 0; i < num_queries; i += kHeadRows) {
        const QueryBlock block = query_block(x.begin, x.end, i, num_queries, static_cast<int>(sequence.len_k));
        backward_block(gradients, heads, score, block, x);
        if (more && r + 1 == problem.group) look_ahead(gradients, next, sequence, i);
      }
    }
    for (int64_t j = 0; j < sequence.len_k; ++j) {
      if (gradients.grad_key.data != nullptr) {
        store_row_of_heads(heads, heads.grad_key, j, dim, x.grad_key + j * padded(dim), problem.scale,
                           gradients.accumulate);
      }
      if (gradients.grad_value.data != nullptr) {
        store_row_of_heads(heads, heads.grad_value, j, dim_v, x.grad_value + j * padded(dim_v), 1,
                           gradients.accumulate);
      }
    }
  }
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
