// FlashAttention-2 forward, algorithm 1 of arXiv:2307.08691, with the words of sm_80: mma.sync, ldmatrix, cp.async.
//   Q_i [64, D]  K_j, V_j [64, D or Dv]  S, P [64, 64]  O [64, Dv]  m, l, L [64]
// A block of four warps computes 64 queries of a head, a warp 16 of them. K_j+1 is on its way while V_j is used, and
// V_j while K_j is. Of a lane's fragments (mma.cuh) elements 0 and 1 belong to row g, 2 and 3 to row g + 8.
#pragma once

#include <cmath>

#include "cuda/band.cuh"
#include "cuda/pages.cuh"
#include "cuda/parts.cuh"
#include "cuda/products.cuh"
#include "cuda/score.cuh"

namespace polyhead::cuda {

template <class T, int kD>
struct ForwardMemory {
  // Of more columns of V a block does 128, since O would not fit in the registers of a thread: another does the rest.
  static constexpr int kColumns = kD < 128 ? kD : 128;

  Tile<T, kSliceColumns<T, kD>> Q, K;
  Tile<T, kColumns> V;
  int not_finite;  // 1 + the last key tile whose V had an infinity or a NaN that some row must not see
  // Not held in registers: of the block's sequence, and the keys that all of the block's queries see.
  Band band;
  Range all;
  Range part;        // of the keys, that this block does
  KeyPlaces places;  // of the keys in pages
  Kept kept;         // by dropout, of the key tile
};

// One warp's share of a tile of scores: S, then P.
struct Scores {
  float x[8][4];  // eight blocks of eight keys
};

// Of a lane's two rows.
struct Row {
  TileRange keys;       // of the tile, that it sees
  float m = -INFINITY;  // the largest score so far
  float l = 0;          // sum of exp(S - m), this lane's part; without a softmax the factor of S
  float l_rounded = 0;  // the same of the weights as they multiply V
  bool seen = false;    // some of this lane's keys, as far as options tell
};

template <class T, int kD, bool kOptions>  // kOptions: a score is more than a product, see Problem
class Forward {
  static constexpr int kColumns = ForwardMemory<T, kD>::kColumns;
  static constexpr int kSlice = kSliceColumns<T, kD>;

 public:
  __device__ Forward(const Problem& problem, ForwardMemory<T, kD>& memory)
      : p(problem), shared(memory), lane(static_cast<int>(threadIdx.x) % 32), warp(static_cast<int>(threadIdx.x) / 32) {
    const OwnRows own(p, false);
    b = own.b, h = own.h, query = own.first;
    if (takes_scores()) rows[0].l = rows[1].l = T::kOnTensorCores ? power_for(0) : 1;
  }

  __device__ void run() {
    const Band band(p, b);
    const int64_t end_q = query + kBlockRows < band.queries ? query + kBlockRows : band.queries;
    const Range of_first = band.keys_of(query), of_last = band.keys_of(end_q - 1);
    // Keys that some query of the tile sees, or of these the block's part.
    int64_t begin = of_first.first / kTileRows * kTileRows, end = query < end_q ? of_last.last : 0;
    if (p.parts > 1) {
      const int64_t share = (end - begin + p.parts - 1) / p.parts, least = kLeastKeysOfPart;
      const int64_t keys = share > least ? (share + kTileRows - 1) / kTileRows * kTileRows : least;
      begin += blockIdx.y * keys;
      if (end > begin + keys) end = begin + keys;
    }
    if (kOptions && begin >= band.sinks && begin < band.behind_sinks(query)) begin = band.behind_sinks(query);
    if (threadIdx.x == 0) {
      shared.not_finite = 0;
      shared.band = band;
      shared.all = {of_last.first, of_first.last};
      shared.part = {begin, end};
    }
    if (in_pages()) shared.places.find(p.pages, b, begin, band.keys);
    __syncthreads();
    if (begin < end) {
      load_queries(0);
      load_keys(shared.K, p.key, begin, p.head_dim);
    }
    for (int64_t j = begin, next; j < end; j = next) {
      next = tile_behind(j);
      for (int n = 0; n < 8; ++n) {
        for (int e = 0; e < 4; ++e) S.x[n][e] = 0;
      }
      wait_for_copies();
      __syncthreads();  // K_j is there, V is free
      for (int slice = 1; slice < kSlices<T, kD>; ++slice) {
        if (busy()) scores(slice - 1);
        __syncthreads();  // a slice of K_j has been used
        load_queries(slice * kSlice);
        load_keys(shared.K, p.key, j, p.head_dim - slice * kSlice, slice * kSlice);
        wait_for_copies();
        __syncthreads();
      }
      load_keys(shared.V, p.value, j, p.head_dim_v - first_column(), first_column());
      if (in_pages() && next < end) shared.places.find(p.pages, b, next, shared.band.keys);
      if (busy()) scores(kSlices<T, kD> - 1);
      wait_for_copies();
      __syncthreads();  // V_j is there, K is free
      if (next < end) {
        if constexpr (kSlices < T, kD >> 1) load_queries(0);
        load_keys(shared.K, p.key, next, p.head_dim);
      }
      // Some row does not see some key.
      const bool cut = hides_pairs() || j < shared.all.first || j + kTileRows > shared.all.last;
      if (busy()) weights(j, cut);
      bool careful = false;
      if (cut) {
        if (clear_not_finite(shared.V)) atomicMax(&shared.not_finite, static_cast<int>(j / kTileRows) + 1);
        __syncthreads();
        careful = shared.not_finite == static_cast<int>(j / kTileRows) + 1;
      }
      if (busy()) multiply();
      if (careful && busy()) add_not_finite(j);
    }
    finish();
  }

 private:
  __device__ bool takes_scores() const { return kOptions && !p.softmax; }
  __device__ bool drops() const { return kOptions && p.dropout.on; }
  __device__ bool drops_late() const { return drops() && p.softmax; }  // when weights meet V
  __device__ bool hides_pairs() const { return kOptions && p.hides_pairs; }
  __device__ int local_row(int r) const { return warp * 16 + lane / 4 + 8 * r; }
  // The query and head of a row of the tile. What is behind the last query of heads that share it is no query.
  __device__ int64_t query_of(int row) const {
    if (p.tile_heads == 1) return query + row;
    return row < rows_of_heads() ? row % static_cast<int>(p.seqlen_q) : kTileRows;
  }
  __device__ int head_of(int row) const { return p.tile_heads == 1 ? h : h + row / static_cast<int>(p.seqlen_q); }
  __device__ int rows_of_heads() const { return static_cast<int>(p.tile_heads * p.seqlen_q); }
  __device__ int64_t row_index(int r) const { return query_of(local_row(r)); }
  // Whether the warp has queries: where they are few it brings keys alone.
  __device__ bool busy() const {
    return p.tile_heads == 1 ? query + warp * 16 < shared.band.queries : warp * 16 < rows_of_heads();
  }
  __device__ int64_t h_kv() const { return h / (p.heads / p.heads_kv); }
  // Of V and O, that the block does.
  __device__ int first_column() const { return kColumns < kD ? static_cast<int>(blockIdx.z) * kColumns : 0; }
  __device__ bool in_pages() const { return p.pages.table != nullptr; }

  // Sinks of the tile at key j.
  __device__ int sinks_from(int64_t j) const { return kOptions ? TileRange::bounded(p.sink_keys - j) : 0; }

  // The key at which the next tile begins. What nobody sees between sinks and windows is left out, but for one tile where
  // KeyPlaces would have the place of that at j for it.
  __device__ int64_t tile_behind(int64_t j) const {
    const int64_t next = j + kTileRows;
    if constexpr (!kOptions) return next;
    const int64_t behind = shared.band.behind_sinks(query);
    if (next < shared.band.sinks || next >= behind) return next;
    return (behind - j) / kTileRows % 2 == 0 ? behind - kTileRows : behind;
  }

  // Where key or value j of the sequence begins, which is below its length; or its page does not exist.
  __device__ int64_t row_of(const Rows& rows, int64_t j) const {
    if (in_pages()) return row_at(rows, h_kv(), shared.places.of(j));
    return h_kv() * rows.head + b * rows.batch + (shared.band.first_k + j) * rows.row;
  }

  __device__ void load_queries(int from) {
    const int64_t base = b * p.query.batch + shared.band.first_q * p.query.row + from * p.query.column;
    load_rows(shared.Q, p.query, p.head_dim - from, [&](int row) {
      const int64_t i = query_of(row);
      return i < shared.band.queries ? base + head_of(row) * p.query.head + i * p.query.row : kNoRow;
    });
  }

  // K_j or V_j
  template <int kWidth>
  __device__ void load_keys(Tile<T, kWidth>& tile, const Rows& rows, int64_t j, int columns, int from = 0) {
    load_rows(tile, rows, columns, [&](int n) {
      const int64_t row = j + n < shared.band.keys ? row_of(rows, j + n) : kNoRow;
      return row == kNoRow ? row : row + from * rows.column;
    });
  }

  // S += Q K^T of a slice of their columns; with the last of them S is whole, and times scale.
  __device__ void scores(int slice) {
    multiply_rows(S.x, shared.Q, warp * 16, shared.K, 0, p.head_dim - slice * kSlice, lane);
    if (slice < kSlices<T, kD> - 1) return;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) S.x[n][e] *= p.scale;
    }
  }

  // S <- P of the tile at key j. `cut`: not every row sees every key.
  __device__ void weights(int64_t j, bool cut) {
    if constexpr (kOptions) {
      for (int r = 0; r < 2; ++r) rows[r].keys = {shared.band.seen_by(p, row_index(r)), j};
      apply_options(j);
    } else if (cut) {
      for (int r = 0; r < 2; ++r) rows[r].keys = {shared.band.keys_of(row_index(r)), j};
      hide();
    }
    if (drops()) shared.kept.fill(p.dropout, b, h, query, j, false);
    takes_scores() ? scores_as_weights() : softmax();
  }

  // S = -inf at the keys that a row does not see
  __device__ void hide() {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = n * 8 + lane % 4 * 2 + e % 2;
        if (!rows[e / 2].keys.holds(key)) S.x[n][e] = -INFINITY;
      }
    }
  }

  // The same, of the scores that options make.
  __device__ void apply_options(int64_t j) {
    const Score score(p, shared.band, b, h, query, j);
    const int sinks = sinks_from(j);
    const float hidden = p.softmax ? -INFINITY : 0;
    const int queries[2] = {static_cast<int>(row_index(0) - query), static_cast<int>(row_index(1) - query)};
#pragma unroll 1
    for (int key = lane % 4 * 2; key < kTileRows; key += 8) {
      float done[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        Row& row = rows[e / 2];
        PairScore pair;
        const bool visible =
            row.keys.holds(key + e % 2, sinks) && score.of(S.x[0][e], pair, queries[e / 2], key + e % 2);
        done[e] = visible ? pair.S : hidden;
        row.seen |= visible;
        shown = shown >> 1 | (visible ? 1u << 31 : 0);
      }
      append(S.x, done);
    }
  }

  // S <- P = exp(S - m), O and l <- theirs times exp(m_old - m)
  __device__ void softmax() {
    float alpha[2], m[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = rows[r].m;
#pragma unroll
      for (int n = 0; n < 8; ++n) largest = fmaxf(largest, fmaxf(S.x[n][2 * r], S.x[n][2 * r + 1]));
      largest = max_of_row(largest);
      m[r] = largest == -INFINITY ? 0 : largest;  // -inf - -inf is NaN
      alpha[r] = exponential<T>(rows[r].m - m[r]);
      rows[r].m = largest;
      rows[r].l *= alpha[r];
      rows[r].l_rounded *= alpha[r];
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        S.x[n][e] = exponential<T>(S.x[n][e] - m[e / 2]);
        rows[e / 2].l += S.x[n][e];
      }
    }
    multiply_rows_of_O(alpha);
  }

  // S <- P = S, dropped, and times a power of two, as l and O are, so that float16 has its digits.
  __device__ void scores_as_weights() {
    float alpha[2] = {1, 1};
#pragma unroll
    for (int r = 0; r < 2 && T::kOnTensorCores; ++r) {
      float largest = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) largest = fmaxf(largest, fmaxf(fabsf(S.x[n][2 * r]), fabsf(S.x[n][2 * r + 1])));
      const float factor = fminf(rows[r].l, power_for(max_of_row(largest)));
      alpha[r] = factor * one_over_power(rows[r].l);
      rows[r].l = factor;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool kept = !drops() || shared.kept.holds(local_row(e / 2), n * 8 + lane % 4 * 2 + e % 2);
        S.x[n][e] *= kept ? rows[e / 2].l : 0;  // what is dropped and not finite is NaN
      }
    }
    multiply_rows_of_O(alpha);
  }

  __device__ void multiply_rows_of_O(const float (&factors)[2]) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) O[n][e] *= factors[e / 2];
    }
  }

  // O += P V
  __device__ void multiply() {
    if constexpr (T::kOnTensorCores) {
      multiply_rounded();
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          rows[e / 2].l_rounded += S.x[n][e];
          if (drops_late() && !shared.kept.holds(local_row(e / 2), n * 8 + lane % 4 * 2 + e % 2)) S.x[n][e] = 0;
        }
      }
      multiply_weights(O, S.x, shared.V, 0, lane);
    }
  }

  __device__ void multiply_rounded() {
    constexpr bool kRest = T::kRestOfWeights;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      unsigned P[4], rest[4];
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const float low = S.x[2 * k + a / 2][a % 2 * 2], high = S.x[2 * k + a / 2][a % 2 * 2 + 1];
        P[a] = packed<T>(low, high);
        const float low_rounded = low_half<T>(P[a]), high_rounded = high_half<T>(P[a]);
        if constexpr (kRest) rest[a] = packed<T>(low - low_rounded, high - high_rounded);
        rows[a % 2].l_rounded += kRest ? low + high : low_rounded + high_rounded;
        if (drops_late()) {
          const unsigned keys = shared.kept.sixteen(local_row(a % 2), k) >> (a / 2 * 8 + lane % 4 * 2);
          const unsigned halves = (keys & 1 ? 0xffffu : 0) | (keys & 2 ? 0xffff0000u : 0);
          P[a] &= halves;
          if constexpr (kRest) rest[a] &= halves;
        }
      }
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        unsigned values[4];
        load_matrices_transposed(values, shared.V.piece(k * 16 + lane % 16, n + lane / 16));
        multiply_add<T>(O[n], P, values[0], values[1]);
        multiply_add<T>(O[n + 1], P, values[2], values[3]);
        if constexpr (kRest) {
          multiply_add<T>(O[n], rest, values[0], values[1]);
          multiply_add<T>(O[n + 1], rest, values[2], values[3]);
        }
      }
    }
  }

  // O += P V with the infinities and NaNs of V alone, for the rows that see them: tensor cores would multiply them by
  // the 0 of a row that does not. What is added is +-inf, or NaN, also where P underflowed to 0.
  __device__ void add_not_finite(int64_t j) {
    const RowBits shown_to =
        kOptions ? RowBits::of<8>(lane, [&](int n, int e) { return shown >> (4 * n + e) & 1; }) : RowBits();
    const auto sees = [&](int r, int key) { return kOptions ? shown_to.hold(r, key) : rows[r].keys.holds(key); };
    if (drops_late()) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!shared.kept.holds(local_row(e / 2), n * 8 + lane % 4 * 2 + e % 2)) S.x[n][e] = 0;
        }
      }
    }
    const Signs<kOptions> signs(S.x, lane);
#pragma unroll 1
    for (int key = 0; key < kTileRows && j + key < shared.band.keys; ++key) {
      const int64_t value = row_of(p.value, j + key);
      if (value == kNoRow) continue;
#pragma unroll 1
      for (int of_lane = lane % 4 * 2; of_lane < kColumns; of_lane += 8) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = first_column() + of_lane + e % 2;
          if (!sees(e / 2, key) || column >= p.head_dim_v) continue;
          const float v = element<T>(p.value, value + column * p.value.column);
          if (v - v != 0) O[0][e] += signs.times(e / 2, key, v);
        }
        rotate(O);
      }
    }
  }

  // O / l and L = m + log l, or what the merging kernel makes them of.
  __device__ void finish() {
    const Band& band = shared.band;
    if (takes_scores()) multiply_rows_of_O({1 / rows[0].l, 1 / rows[1].l});
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      RowSums row;
      row.m = rows[r].m;
      row.l = sum_of_row(rows[r].l);
      row.l_rounded = sum_of_row(rows[r].l_rounded);
      if (takes_scores()) row = {0, 0, 1};
      const Range keys = band.keys_of(row_index(r)), &part = shared.part;
      const bool sees = keys.first < part.last && part.first < keys.last && !keys.empty();
      const bool seen = kOptions ? sum_of_row(rows[r].seen ? 1 : 0) > 0 : sees && !part.empty();
      const int64_t i = row_index(r);
      if (i >= band.rows_q) continue;
      row.state = i >= band.queries ? RowSums::kPadding : seen ? RowSums::kSeen : RowSums::kUnseen;
      if (p.parts == 1) {
        write(row, r, i);
      } else {
        leave(row, r, i);
      }
    }
  }

  __device__ void write(const RowSums& sums, int r, int64_t i) const {
    const int head = head_of(local_row(r));
    const FinishedRow<kOptions> finished(p, head, sums);
    const int64_t row = shared.band.first_q + i, out = b * p.out.batch + head * p.out.head + row * p.out.row;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      for (int e = 0; e < 2; ++e) {
        const int column = first_column() + n * 8 + lane % 4 * 2 + e;
        if (column < p.head_dim_v) store_sum<T>(p.out, out + column * p.out.column, finished.out(O[n][2 * r + e]));
      }
    }
    if (p.logsumexp.data != nullptr && tells_statistics()) statistic(p.logsumexp, b, head, row) = finished.logsumexp();
  }

  // One of the lanes and blocks that know them.
  __device__ bool tells_statistics() const { return lane % 4 == 0 && first_column() == 0; }

  // Where no key was seen O is not read.
  __device__ void leave(const RowSums& sums, int r, int64_t i) const {
    const RowParts parts(p, b, head_of(local_row(r)), shared.band.first_q, i);
    if (tells_statistics()) parts.store(blockIdx.y, sums);
    if (!sums.seen()) return;
    float* out = parts.sums(blockIdx.y);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      for (int e = 0; e < 2; ++e) {
        const int column = first_column() + n * 8 + lane % 4 * 2 + e;
        if (column < p.head_dim_v) out[column] = O[n][2 * r + e];
      }
    }
  }

  const Problem& p;
  ForwardMemory<T, kD>& shared;
  int64_t query;  // the first of the tile
  int b, h;       // its sequence and head
  int lane, warp;
  Row rows[2];
  Scores S;
  unsigned shown = 0;  // with options: which of this lane's pairs of the tile are seen, bit 4 n + e
  float O[kColumns / 8][4] = {};
};

}  // namespace polyhead::cuda
