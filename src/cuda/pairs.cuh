// What the gradients of attention recompute: P and dS of a tile of pairs, for the file that says what is summed of them.
//   P = exp(S - L)   dP = dropout(dO V^T)   dS = P (dP - delta)   delta = sum_c dO O - dL
// A block owns 64 rows, a warp 16 of them, and looks at tiles of 64 others, kStep at a time.
//   kKeys false   own Q, dO   others K, V    products P, dS [own, others]
//   kKeys true    own K, V    others Q, dO   products P^T, dS^T
#pragma once

#include "cuda/band.cuh"
#include "cuda/products.cuh"
#include "cuda/score.cuh"

namespace polyhead::cuda {

// kSides: 2, or of weights alone 1: Q and K.
template <class T, int kD, int kSides = 2>
struct PairsMemory {
  // Two stages: one is on its way while the other is used. Of wide rows there is room for one.
  static constexpr int kStages = kD * sizeof(T) > 256 ? 1 : 2;
  using Columns = Tile<T, kSliceColumns<T, kD>>;

  Columns own[kSides];
  Columns others[kStages][kSides];
  float L[2][kTileRows], delta[2][kTileRows];  // of the others, where they are queries
  int not_finite;                              // 1 + the last tile of which some row must not see all, see careful
  Band band;                                   // of the block, not held in registers
  int64_t begin;                               // the first other that some own row sees, down to a tile's edge
  Range all;                                   // the others that all its rows see
  int before_gap;                              // tiles of keys in front of those that none sees, of `gap` keys
  int64_t gap;
  Kept kept;  // by dropout
};

template <class T, int kD, bool kKeys, bool kOptions, int kStep, int kSides = 2>
class Pairs {
 protected:
  using Block = float[kStep / 8][4];  // of this warp's rows and kStep others

  __device__ Pairs(const BackwardProblem& problem, PairsMemory<T, kD, kSides>& memory)
      : p(problem),
        shared(memory),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32) {}

  __device__ bool drops() const { return kOptions && p.dropout.on; }
  __device__ bool hides_pairs() const { return kOptions && p.hides_pairs; }
  // Of the columns of both products.
  __device__ int num_slices() const { return slices_of<T, kD>(p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v); }
  __device__ int64_t group() const { return p.heads / p.heads_kv; }
  __device__ int local_row(int r) const { return warp * 16 + lane / 4 + 8 * r; }
  __device__ int64_t row_index(int r) const { return own + local_row(r); }
  __device__ int other_index(int from, int n, int e) const { return from + n * 8 + lane % 4 * 2 + e % 2; }
  __device__ bool sees(int r, int other) const { return !cut || range[r].holds(other, sinks()); }
  // Behind weights_by_options().
  __device__ RowBits shown_pairs() const {
    return RowBits::of<kStep / 8>(lane, [&](int n, int e) { return shown >> (4 * n + e) & 1; });
  }
  __device__ int sinks() const { return kOptions && !kKeys ? TileRange::bounded(p.sink_keys - first) : 0; }
  __device__ static Range range_of(const Band& band, int64_t row) {
    return kKeys ? band.queries_of(row) : band.keys_of(row);
  }
  __device__ Score score_of_tile() const {
    return kKeys ? Score(p, shared.band, b, head, first, own) : Score(p, shared.band, b, head, own, first);
  }
  // Of own keys, whose ranges are of queries: whether key r is in the window of a query.
  __device__ bool in_window(int query, int r) const {
    if (p.window_lo.data == nullptr) return true;
    const int64_t i = first + query, j = row_index(r);
    return j < element(p.window_hi, i) && (j >= element(p.window_lo, i) || j < p.sink_keys);
  }

  // L and delta of this lane's rows, where they are queries.
  __device__ void read_statistics(const Band& band) {
    for (int r = 0; r < 2; ++r) {
      const int64_t i = band.first_q + row_index(r);
      L[r] = row_index(r) < band.queries ? statistic_or_0(p.logsumexp, head, i) : 0;
      delta[r] = row_index(r) < band.queries ? statistic_or_0(p.delta, head, i) : 0;
    }
  }
  // Without a softmax there are none.
  __device__ float statistic_or_0(const Statistic& x, int64_t h, int64_t i) const {
    return x.data == nullptr ? 0 : statistic(x, b, h, i);
  }

  // Which weights of the tile dropout keeps.
  __device__ void draw() {
    if (drops()) shared.kept.fill(p.dropout, b, head, kKeys ? first : own, kKeys ? own : first, kKeys);
  }

  // Products of this warp's own rows with kStep others: n = 0 Q K^T, n = 1 dO V^T, or their transposes. Of the slice of
  // their columns that lies in shared memory.
  __device__ void products(Block& C, int n, int from, int slice = 0) {
    const int columns = (n == 0 ? p.head_dim : p.head_dim_v) - slice * kSliceColumns<T, kD>;
    multiply_rows(C, shared.own[n], warp * 16, shared.others[stage][n], from, columns, lane);
  }

  // Q K^T -> dropout(P), dO V^T -> dS
  __device__ void weights(Block& P, Block& dS, int from) {
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int x = other_index(from, n, e);
        const float weight = exponential<T>(P[n][e] * p.scale - L_of(e, x));
        const bool visible = sees(e / 2, x);
        dS[n][e] = visible ? weight * (dS[n][e] - delta_of(e, x)) : 0;
        P[n][e] = visible ? weight : 0;
      }
    }
  }

  // The same with options. What dS becomes is told by gradient(score before the program, dS, i, j) of the query and the key of the
  // pair; with kOfProducts dS is of Q K^T.
  template <bool kOfProducts, class Gradient>
  __device__ void weights_by_options(Block& P, Block& dS, int from, const Score& score, const Gradient& gradient) {
    constexpr int kBlocks = kStep / 8;
    const int own_rows[2] = {local_row(0), local_row(1)}, other = other_index(from, 0, 0);
    const unsigned kept = drops() ? shared.kept.template pairs<kKeys, kBlocks>(own_rows, other) : ~0u;
    for_each_pair<kBlocks>([&](int n, int e) {  // dS of a weight of 1
      const float factor = !drops() ? 1 : kept & bit_of_pair(n, e) ? p.dropout.factor : 0;
      P[n][e] *= p.scale;
      dS[n][e] = factor * dS[n][e] - (p.softmax ? delta_of(e, other + 8 * n + e % 2) : 0);
    });
    shown = pairs_in<kBlocks>(range[0], range[1], other, sinks());
    if (kKeys && p.window_lo.data != nullptr) {
      for_each_pair<kBlocks>([&](int n, int e) {
        const unsigned bit = bit_of_pair(n, e);
        if ((shown & bit) && !in_window(other + 8 * n + e % 2, e / 2)) shown &= ~bit;
      });
    }
    shown = score.template apply<T, kKeys>(P, own_rows, other, shown, [&](int n, int e, float derivative) {
      if constexpr (kOfProducts) dS[n][e] *= derivative;
    });
    if constexpr (kHasProgram) {
#pragma unroll 1
      for (int n = 0; n < kBlocks; ++n) {
        for_each_pair<1>([&](int, int e) {
          const unsigned bit = bit_of_pair(0, e);
          const bool visible = finish_pair(P[0][e], dS[0][e], shown & bit, kept >> 4 * n & bit, e,
                                           other + 8 * n + e % 2, score, gradient);
          if (!visible) shown &= ~bit;
        });
        rotate(P);
        rotate(dS);
        shown = rotated_pairs<kBlocks>(shown);
      }
    } else {
      for_each_pair<kBlocks>([&](int n, int e) {
        const unsigned bit = bit_of_pair(n, e);
        finish_pair(P[n][e], dS[n][e], shown & bit, kept & bit, e, other + 8 * n + e % 2, score, gradient);
      });
    }
  }

  const BackwardProblem& p;
  PairsMemory<T, kD, kSides>& shared;
  int64_t own = 0;      // the first row that the block owns
  int b = 0, head = 0;  // the sequence and head of the queries
  int64_t first = 0;    // of the others
  int stage = 0, lane, warp;
  bool cut = false;                // some row does not see some other
  unsigned shown = 0;              // with options: which of this lane's pairs are seen, bit 4 n + e
  TileRange range[2];              // of the others that this lane's two rows see
  float L[2] = {}, delta[2] = {};  // of these rows, where they are queries

 private:
  // Of one pair with other x: the score before a program -> dropout(P), dS of a weight of 1 -> what `gradient` says. Returns
  // whether it is visible, also to the program.
  template <class Gradient>
  __device__ bool finish_pair(float& P, float& dS, bool visible, bool kept, int e, int x, const Score& score,
                              const Gradient& gradient) const {
    const int row = local_row(e / 2), i = kKeys ? x : row, j = kKeys ? row : x;
    const float before = P;
    if constexpr (kHasProgram) visible = visible && score.run_program(P, i, j);
    const float weight = p.softmax ? exponential<T>(P - L_of(e, x)) : P;
    const float of_score = p.softmax ? weight * dS : dS;
    P = !visible ? 0 : drops() ? weight * (kept ? p.dropout.factor : 0) : weight;  // a NaN that is dropped is one
    dS = visible ? gradient(before, of_score, i, j) : 0;
    return visible;
  }
  __device__ float L_of(int e, int x) const { return kKeys ? shared.L[stage][x] : L[e / 2]; }
  __device__ float delta_of(int e, int x) const { return kKeys ? shared.delta[stage][x] : delta[e / 2]; }
};

}  // namespace polyhead::cuda
