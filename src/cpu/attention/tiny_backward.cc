// Backward of many small heads: one key/value head a lane, kLanes of them at once, query after query.
//   Q, dQ [D]   dO, O [Dv]   S, P, dP, dS [Sk] of one query   K, dK [Sk][D]   V, dV [Sk][Dv]: every element a vector
#include "cpu/attention/head_lanes.h"
#include "cpu/attention/score/policy.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kMatrix = kTinySize * kTinySize;

struct TinyGradientMemory {
  F key[kMatrix], value[kMatrix], grad_key[kMatrix], grad_value[kMatrix];  // rows of dims, padded to a multiple of 4
  F query[kTinySize], grad_query[kTinySize], grad_out[kTinySize], out[kTinySize];
  F logsumexp[kTinySize], delta[kTinySize];  // of each query
  F scores[kTinySize], grad_scores[kTinySize];
  int begin[kTinySize], end[kTinySize];  // keys that each query sees
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

// One number a query, of every head.
void load_statistic(F* out, const HeadRows& x, int num_queries) {
  for (int first = 0; first < num_queries; first += 4) {
    F quad[4];
    const int n = num_queries - first < 4 ? num_queries - first : 4;
    load_columns_of_heads(quad, x, first * x.column_bytes, n);
    for (int i = 0; i < n; ++i) out[first + i] = quad[i];
  }
}

void store_row_of_heads(const Heads& heads, const HeadRows& x, int64_t row, int64_t dim, const F* in, float factor,
                        bool accumulate) {
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

// sums[j] += weight[j] * x, and own = sum weight[j] * rows[j], for keys [begin, end); each unless null.
void add_rows(F* sums, F* own, const F* rows, const F* x, const F* weight, int64_t dim, int begin, int end) {
  const int64_t stride = padded(dim);
  for (int64_t d = 0; d < stride; d += 4) {
    F o[4], x_d[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      x_d[i] = x[d + i];
      o[i] = broadcast(0.0f);
    }
    for (int j = begin; j < end; ++j) {
      const F* row = rows + j * stride + d;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        if (sums != nullptr) sums[j * stride + d + i] = fma(weight[j], x_d[i], sums[j * stride + d + i]);
        if (own != nullptr) o[i] = fma(weight[j], row[i], o[i]);
      }
    }
    for (int i = 0; i < 4 && own != nullptr; ++i) own[d + i] = o[i];
  }
}

// P and dS of query i from its products with keys and values.
void differentiate(const Score& score, TinyGradientMemory& x, int i) {
  const F L = x.logsumexp[i], delta = x.delta[i];
  for (int j = x.begin[i]; j < x.end[i]; ++j) {
    const HeadsPlace at{i, j};
    const Options::View view;
    Options::Kept kept;
    const F s = score.of(x.scores[j], at, view, kept);
    x.scores[j] = exp2(fms(s, broadcast(score.to_natural), L), broadcast(kLog2E));
    const F ds = x.scores[j] * (x.grad_scores[j] - delta);
    x.grad_scores[j] = score.scaled_first ? score.options.raw_gradient(ds, at, view, kept) : ds;
  }
}

void backward_query(const BackwardProblem& gradients, const Heads& heads, const Score& score, TinyGradientMemory& x,
                    int i) {
  const Problem& problem = gradients.forward;
  const int64_t dim = problem.head_dim, dim_v = problem.head_dim_v;
  const int begin = x.begin[i], end = x.end[i];
  load_row_of_heads(x.query, heads.query, i, dim);
  load_row_of_heads(x.grad_out, heads.grad_out, i, dim_v);
  if (gradients.delta.data == nullptr) {
    load_row_of_heads(x.out, heads.out, i, dim_v);
    multiply_rows(x.delta + i, x.grad_out, x.out, dim_v, 0, 1);  // in the order of dP
  }
  if (gradients.grad_logsumexp.data != nullptr) {
    F grad[kTinySize];
    load_statistic(grad, heads.grad_logsumexp, i + 1);
    x.delta[i] = x.delta[i] - grad[i];
  }
  multiply_rows(x.scores, x.query, x.key, dim, begin, end);
  const bool wants_query = gradients.grad_query.data != nullptr, wants_key = gradients.grad_key.data != nullptr;
  if (wants_query || wants_key) multiply_rows(x.grad_scores, x.grad_out, x.value, dim_v, begin, end);
  differentiate(score, x, i);
  if (gradients.grad_value.data != nullptr) {
    add_rows(x.grad_value, nullptr, x.value, x.grad_out, x.scores, dim_v, begin, end);
  }
  if (wants_query || wants_key) {
    add_rows(wants_key ? x.grad_key : nullptr, wants_query ? x.grad_query : nullptr, x.key, x.query, x.grad_scores, dim,
             begin, end);
  }
  if (!wants_query) return;
  store_row_of_heads(heads, heads.grad_query, i, dim, x.grad_query, problem.scale, gradients.accumulate);
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
  for (; first < end; first += kLanes) {
    Heads heads;
    set_keys(heads, gradients, heads_kv, first, end);
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
      for (int i = 0; i < num_queries; ++i) backward_query(gradients, heads, score, x, i);
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
