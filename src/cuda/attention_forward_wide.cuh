// Forward of many queries, whose scores are nothing but products: FlashAttention-2 (attention_forward.cuh) with tiles
//   Q_i [128, D]  K_j, V_j [32, D]  S, P [128, 32]  O [128, D]  m, l, L [128]
// A warp has 32 queries, so that what it reads of K and V in shared memory serves two fragments; and few keys at a time, since
// their scores lie in registers beside O. K_j+1 and V_j+1 are on their way while K_j and V_j are used.
#pragma once

#include "cuda/band.cuh"
#include "cuda/pages.cuh"
#include "cuda/parts.cuh"
#include "cuda/products.cuh"
#include "cuda/softmax.cuh"

namespace polyhead::cuda {

// From first to last, exclusive: of a problem of 2^31 keys at most.
struct Keys {
  int first = 0, last = 0;

  Keys() = default;
  // What Band says, whose first may be beyond the `keys` that there are, and whose last in front of them.
  __device__ Keys(int64_t from, int64_t to, int64_t keys)
      : first(static_cast<int>(from < keys ? from : keys)), last(static_cast<int>(to > 0 ? to : 0)) {}
  __device__ Keys(const Band& band, int64_t query) {
    const Range range = band.keys_of(query);
    *this = {range.first, range.last, band.keys};
  }

  __device__ bool hold(int key) const { return first <= key && key < last; }
  __device__ bool empty() const { return first >= last; }
};

// What a block of threads computes: `rows` queries of a head, with the keys that all of them see, and those that some do. Held
// in shared memory, not in registers.
struct WideBlock {
  OwnRows own;
  Band band;
  Keys of_all, of_some;
  int h_kv;                  // the head of the keys
  int64_t first_element[2];  // of the sequence's K and V, where they are not in pages

  __device__ WideBlock(const Problem& p, int rows, Sequences sequences = Sequences::kAll)
      : own(p, false, rows, sequences), band(p, own.b) {
    const int64_t first = own.first, end = first + rows < band.queries ? first + rows : band.queries;
    const Range of_first = band.keys_of(first), of_last = band.keys_of(end - 1);
    of_all = {of_last.first, of_first.last, band.keys};
    of_some = {of_first.first, first < end ? of_last.last : 0, band.keys};
    h_kv = own.h / (static_cast<int>(p.heads) / static_cast<int>(p.heads_kv));
    for (const bool value : {false, true}) {
      const Rows& side = value ? p.value : p.key;
      first_element[value] = h_kv * side.head + own.b * side.batch + band.first_k * side.row;
    }
  }

  // Where its first query begins.
  __device__ int64_t first_query(const Problem& p) const {
    return own.b * p.query.batch + own.h * p.query.head + (band.first_q + own.first) * p.query.row;
  }
};

template <class T, int kD>
struct WideMemory {
  static constexpr int kRows = 2 * kBlockRows, kKeys = 32;

  struct Stage {
    Tile<T, kD, kKeys> K, V;
  };
  Tile<T, kD, kRows> Q;
  Stage stages[2];
  int not_finite;  // 1 + the last key tile whose V had an infinity or a NaN that some row must not see
  WideBlock block;
  Keys of_warp[kBlockThreads / 32];  // that some query of each sees
  Keys of_row[kRows];                // that each sees
  KeyPlaces<kKeys, 3> places;        // those in pages: of the tile in use too, whose values may be read again
};

template <class T, int kD>
class WideForward {
  using Memory = WideMemory<T, kD>;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys, kBlocks = kKeys / 8;
  static constexpr int kSixteens = kRows / (16 * kThreads / 32);

 public:
  __device__ WideForward(const Problem& problem, Memory& memory)
      : p(problem),
        shared(memory),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32) {}

  __device__ void run() {
    const int begin = prepare();
    if (begin < shared.block.of_some.last) {
      load_queries();
      load_keys(shared.stages[0], begin);
    }
    int stage = 0;
    for (int j = begin; j < shared.block.of_some.last; j += kKeys, stage ^= 1) {
      wait_for_copies();
      __syncthreads();  // this stage is there, and nobody reads the other
      if (j + kKeys < shared.block.of_some.last) load_keys(shared.stages[stage ^ 1], j + kKeys);
      if (in_pages()) shared.places.find(p.pages, shared.block.own.b, j + 2 * kKeys, shared.block.band.keys);
      tile(shared.stages[stage], j);
    }
    finish();
  }

 private:
  __device__ bool in_pages() const { return p.pages.table != nullptr; }
  __device__ int first_row() const { return warp * 16 * kSixteens; }
  // Of a lane's rows, two of each sixteen.
  __device__ int local_row(int r) const { return first_row() + lane / 4 + 8 * r; }

  // What lies in shared memory but tiles. Returns the first key.
  __device__ int prepare() {
    const WideBlock block(p, kRows);
    const int begin = block.of_some.first / kKeys * kKeys;
    if (threadIdx.x == 0) {
      shared.not_finite = 0;
      shared.block = block;
    }
    static_assert(kRows == kThreads);
    shared.of_row[threadIdx.x] = {block.band, block.own.first + threadIdx.x};
    if (lane == 0) {
      const Band& band = block.band;
      const int64_t first = block.own.first + first_row(), behind = first + 16 * kSixteens;
      const int64_t last = (behind < band.queries ? behind : band.queries) - 1;
      Keys keys;
      if (first <= last) keys = {band.keys_of(first).first, band.keys_of(last).last, band.keys};
      shared.of_warp[warp] = keys;
    }
    if (in_pages()) {
      shared.places.find(p.pages, block.own.b, begin, block.band.keys);
      shared.places.find(p.pages, block.own.b, begin + kKeys, block.band.keys);
    }
    __syncthreads();
    return begin;
  }

  // Where key or value j of the sequence begins, which is below its length; or its page does not exist.
  __device__ int64_t row_of(bool value, int j) const {
    const Rows& rows = value ? p.value : p.key;
    return in_pages() ? row_at(rows, shared.block.h_kv, shared.places.of(j))
                      : shared.block.first_element[value] + static_cast<int64_t>(j) * rows.row;
  }

  __device__ void load_queries() {
    const WideBlock& block = shared.block;
    load_rows_apart(shared.Q, p.query, p.head_dim, block.first_query(p), block.band.queries - block.own.first);
  }

  __device__ void load_keys(typename Memory::Stage& to, int j) {
    load_rows_from(to.K, false, j);
    load_rows_from(to.V, true, j);
  }
  __device__ void load_rows_from(Tile<T, kD, kKeys>& tile, bool value, int j) {
    const Rows& rows = value ? p.value : p.key;
    const int columns = value ? p.head_dim_v : p.head_dim;
    const int keys = static_cast<int>(shared.block.band.keys) - j;
    if (in_pages()) {
      load_rows(tile, rows, columns, [&](int n) { return n < keys ? row_of(value, j + n) : kNoRow; });
    } else {
      load_rows_apart(tile, rows, columns, row_of(value, j), keys);
    }
  }

  __device__ void tile(typename Memory::Stage& at, int j) {
    const Keys of_warp = shared.of_warp[warp], of_all = shared.block.of_all;
    const bool busy = of_warp.first < j + kKeys && j < of_warp.last;
    const bool cut = j < of_all.first || j + kKeys > of_all.last;  // some row does not see some key
    if (busy) weights(at.K, j, cut);
    bool careful = false;
    if (cut) {
      const int number = j / kKeys + 1;
      if (clear_not_finite(at.V)) atomicMax(&shared.not_finite, number);
      __syncthreads();
      careful = shared.not_finite == number;
    }
    if (busy) multiply(at.V);
    if (careful && busy) add_not_finite_values(j);
  }

  // S <- P of the tile at key j, O and l <- theirs times exp(m_old - m)
  __device__ void weights(Tile<T, kD, kKeys>& K, int j, bool cut) {
#pragma unroll
    for (int a = 0; a < kSixteens; ++a) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) S[a][n][e] = 0;
      }
    }
    multiply_rows(S, shared.Q, first_row(), K, 0, p.head_dim, lane);
#pragma unroll
    for (int a = 0; a < kSixteens; ++a) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) S[a][n][e] = rounded_product(S[a][n][e], p.scale);
      }
      if (cut) hide(a, j);
      float alpha[2];
      softmax_step<T>(S[a], rows[2 * a], rows[2 * a + 1], alpha);
      rescale_rows_of(O[a], alpha);
    }
  }

  // S = -inf at the keys that a row does not see
  __device__ void hide(int a, int j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Keys seen = shared.of_row[local_row(2 * a + r)];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (!seen.hold(j + n * 8 + lane % 4 * 2 + e)) S[a][n][2 * r + e] = -INFINITY;
        }
      }
    }
  }

  // O += P V
  __device__ void multiply(Tile<T, kD, kKeys>& V) {
    if constexpr (T::kOnTensorCores) {
      multiply_rounded(V);
    } else {
      multiply_weights(O, S, V, 0, lane);
    }
  }

  __device__ void multiply_rounded(Tile<T, kD, kKeys>& V) {
    const unsigned of_V = V.address(lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      unsigned P[kSixteens][4], rest[kSixteens][4];
#pragma unroll
      for (int a = 0; a < kSixteens; ++a) round_weights<T>(S[a], k, rows[2 * a], rows[2 * a + 1], P[a], rest[a]);
#pragma unroll
      for (int n = 0; n < kD / 8; n += 2) {
        unsigned values[4];
        load_matrices_transposed(values, (of_V ^ 16 * n) + k * 16 * V.kRowBytes);
#pragma unroll
        for (int a = 0; a < kSixteens; ++a) {
          multiply_add<T>(O[a][n], P[a], values[0], values[1]);
          multiply_add<T>(O[a][n + 1], P[a], values[2], values[3]);
          if constexpr (T::kRestOfWeights) {
            multiply_add<T>(O[a][n], rest[a], values[0], values[1]);
            multiply_add<T>(O[a][n + 1], rest[a], values[2], values[3]);
          }
        }
      }
    }
  }

  // O += P V with the infinities and NaNs of V, which are not in shared memory.
  __device__ void add_not_finite_values(int j) {
#pragma unroll
    for (int a = 0; a < kSixteens; ++a) {
      const Keys seen[2] = {shared.of_row[local_row(2 * a)], shared.of_row[local_row(2 * a + 1)]};
      add_not_finite<T, false>(
          O[a], S[a], p.value, shared.block.band.keys - j, 0, p.head_dim_v, lane,
          [&](int key) { return row_of(true, j + key); }, [&](int r, int key) { return seen[r].hold(j + key); });
    }
  }

  // O / l and L = m + log l
  __device__ void finish() {
    const Band& band = shared.block.band;
    const int b = shared.block.own.b, h = shared.block.own.h;
#pragma unroll
    for (int r = 0; r < 2 * kSixteens; ++r) {
      const int64_t i = shared.block.own.first + local_row(r);
      RowSums sums;
      sums.m = rows[r].m;
      sums.l = sum_of_row(rows[r].l);
      sums.l_rounded = T::kOnTensorCores ? sum_of_row(rows[r].l_rounded) : sums.l;
      if (i >= band.rows_q) continue;
      const Keys seen = shared.of_row[local_row(r)];
      sums.state = i >= band.queries ? RowSums::kPadding : seen.empty() ? RowSums::kUnseen : RowSums::kSeen;
      const FinishedRow<false> finished(p, h, sums);
      const int64_t row = band.first_q + i, out = b * p.out.batch + h * p.out.head + row * p.out.row;
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        for (int e = 0; e < 2; ++e) {
          const int column = n * 8 + lane % 4 * 2 + e;
          if (column >= p.head_dim_v) continue;
          store_sum<T>(p.out, out + column * p.out.column, finished.out(O[r / 2][n][r % 2 * 2 + e]));
        }
      }
      if (p.logsumexp.data != nullptr && lane % 4 == 0) statistic(p.logsumexp, b, h, row) = finished.logsumexp();
    }
  }

  const Problem& p;
  Memory& shared;
  int lane, warp;
  SoftmaxRow rows[2 * kSixteens];
  float S[kSixteens][kBlocks][4];  // then P
  float O[kSixteens][kD / 8][4] = {};
};

}  // namespace polyhead::cuda
