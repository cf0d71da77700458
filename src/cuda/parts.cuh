// What is left of a row of queries when its keys are done, and how blocks share these keys: each leaves the maximum m of
// its scores, l = sum exp(S - m) and O = sum exp(S - m) V; merged in the order of the keys they are those of all.
#pragma once

#include "cuda/numbers.cuh"
#include "cuda/score.cuh"

namespace polyhead::cuda {

// Of a row, or of a part of its keys.
struct RowSums {
  enum State { kUnseen, kSeen, kPadding };  // whether it saw some key; not a query

  float m = -INFINITY;  // the largest score
  float l = 0;          // sum of exp(S - m)
  float l_rounded = 0;  // the same of the weights as they multiply V
  State state = kUnseen;

  __device__ bool seen() const { return state == kSeen; }
};

// What becomes of O, and of the logsumexp, of a row.
template <bool kOptions>
class FinishedRow {
 public:
  // A row that saw no key gets 0 and its sink; without one, or in padding, -inf.
  __device__ FinishedRow(const Problem& p, int64_t h, const RowSums& row)
      : m(row.m), l(row.seen() ? row.l : 0), l_rounded(row.l_rounded), seen(row.seen()) {
    if (!kOptions) return;
    factor = p.dropout.factor;
    if (!p.softmax) l = 0, l_rounded = 1;
    if (p.sinks != nullptr && row.state != RowSums::kPadding) add_sink(sink_of(p, h));
  }

  __device__ float out(float O) const {
    const float unseen = l != l ? l : 0;
    return seen ? factor * O / l_rounded : unseen;
  }
  // Once for a row: out(O) is this times O, to an ulp of float32.
  __device__ float factor_of_out() const { return factor / l_rounded; }
  __device__ float logsumexp() const {
    const float none = seen ? NAN : -INFINITY;  // all scores that it saw were -inf
    return l == 0 ? none : m + logf(l);
  }

 private:
  // One more score.
  __device__ void add_sink(float sink) {
    const float largest = fmaxf(m, sink), finite = largest == -INFINITY ? 0 : largest;
    const float alpha = exponential<Float32>(m - finite), weight = exponential<Float32>(sink - finite);
    m = largest;
    l = l * alpha + weight;
    l_rounded = l_rounded * alpha + weight;
    factor *= alpha;
  }

  float m, l, l_rounded, factor = 1;
  bool seen;
};

// What the parts of a row leave in the workspace.
class RowParts {
 public:
  __device__ RowParts(const Problem& problem, int64_t row) : p(problem), first(row * p.parts) {}
  // Of sequence b, whose first query is first_q.
  __device__ RowParts(const Problem& problem, int64_t b, int64_t h, int64_t first_q, int64_t i)
      : RowParts(problem, ((problem.packed ? 0 : b) * problem.heads + h) * problem.seqlen_q + first_q + i) {}

  __device__ void store(int64_t part, const RowSums& row) const {
    const float4 four = {row.m, row.l, row.l_rounded, static_cast<float>(row.state)};
    reinterpret_cast<float4*>(p.part_statistics)[first + part] = four;
  }
  __device__ RowSums load(int64_t part) const {
    const float4 four = reinterpret_cast<const float4*>(p.part_statistics)[first + part];
    return {four.x, four.y, four.z, static_cast<RowSums::State>(static_cast<int>(four.w))};
  }
  __device__ float* sums(int64_t part) const { return p.part_sums + (first + part) * p.head_dim_v; }

  // What a part is multiplied by where m is the largest score of all.
  __device__ static float factor(const RowSums& part, float m) {
    return exponential<Float32>(part.m - (m == -INFINITY ? 0 : m));
  }

  // Without O.
  __device__ RowSums merged() const {
    RowSums all;
    for (int64_t n = 0; n < p.parts; ++n) {
      const RowSums part = load(n);
      all.m = fmaxf(all.m, part.m);
      if (part.state > all.state || n == 0) all.state = part.state;
    }
    for (int64_t n = 0; n < p.parts; ++n) {
      const RowSums part = load(n);
      if (!part.seen()) continue;
      const float alpha = factor(part, all.m);
      all.l += part.l * alpha;
      all.l_rounded += part.l_rounded * alpha;
    }
    return all;
  }

  // O, in columns from, from + 32 and so on.
  __device__ void merge_sums(float m, int from, float (&O)[kMostTileColumns / 32]) const {
    for (int64_t n = 0; n < p.parts; ++n) {
      const RowSums part = load(n);
      if (!part.seen()) continue;
      const float alpha = factor(part, m);
      const float* of_part = sums(n);
#pragma unroll
      for (int c = 0; c < kMostTileColumns / 32; ++c) {
        const int column = from + 32 * c;
        if (column < p.head_dim_v) O[c] += of_part[column] * alpha;
      }
    }
  }

 private:
  const Problem& p;
  int64_t first;
};

}  // namespace polyhead::cuda
