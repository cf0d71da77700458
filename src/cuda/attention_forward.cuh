// FlashAttention-2 forward, algorithm 1 of arXiv:2307.08691, with the words of sm_80: mma.sync, ldmatrix, cp.async.
//   Q_i [64, D]  K_j, V_j [64, D or Dv]  S, P [64, 64]  O [64, Dv]  m, l, L [64]
// A block of four warps computes 64 queries of a head, a warp 16 of them (many plain ones: attention_forward_wide.cuh).
// K_j+1 is on its way while V_j is used, and V_j while K_j is. Of a lane's fragments (mma.cuh) elements 0 and 1 belong to row
// g, 2 and 3 to row g + 8.
#pragma once

#include "cuda/band.cuh"
#include "cuda/pages.cuh"
#include "cuda/parts.cuh"
#include "cuda/products.cuh"
#include "cuda/score.cuh"
#include "cuda/softmax.cuh"
#include "cuda/stored.cuh"

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
  Range part;          // of the keys, that this block does
  KeyPlaces<> places;  // of the keys in pages
  Kept kept;           // by dropout, of the key tile
};

// One warp's share of a tile of scores: S, then P.
struct Scores {
  float x[8][4];  // eight blocks of eight keys
};

// Of a lane's two rows. Without a softmax l is the factor of S.
struct Row : SoftmaxRow {
  TileRange keys;     // of the tile, that it sees
  bool seen = false;  // some of this lane's keys, as far as options tell
};

// kOptions: a score is more than a product, see Problem. kStored: the problem is a StoredProblem.
template <class T, int kD, bool kOptions, bool kStored = false>
class Forward {
  static constexpr int kColumns = ForwardMemory<T, kD>::kColumns;
  static constexpr int kSlice = kSliceColumns<T, kD>;
  // Of the softmax in a tile. As many keys in each as WideForward takes, so that a query has the same bits by both.
  static constexpr int kSteps = kOptions ? 1 : 2;

 public:
  using Memory = ForwardMemory<T, kD>;

  __device__ Forward(const Problem& problem, Memory& memory)
      : p(problem), shared(memory), lane(static_cast<int>(threadIdx.x) % 32), warp(static_cast<int>(threadIdx.x) / 32) {
    const OwnRows own(p, false, tile_queries(), beside_groups() ? Sequences::kShort : Sequences::kAll);
    b = own.b, h = own.h, query = own.first;
    h_kv = h / static_cast<int>(p.heads / p.heads_kv);
    if (takes_scores()) rows[0].l = rows[1].l = T::kOnTensorCores ? power_for(0) : 1;
  }

  __device__ void run() {
    const Band band(p, b);
    if (beside_groups() && band.rows_q > kBlockRows) return;
    const int64_t end_q = query + tile_queries() < band.queries ? query + tile_queries() : band.queries;
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
      load_keys<kKeys>(shared.K, begin, p.head_dim);
    }
    for (int64_t j = begin, next; j < end; j = next) {
      next = tile_behind(j);
      for (int n = 0; n < 8; ++n) {
        for (int e = 0; e < 4; ++e) S.x[n][e] = 0;
      }
      wait_for_copies();
      __syncthreads();  // K_j is there, V is free
      for (int slice = 1; slice < num_slices(); ++slice) {
        if (busy()) scores(slice - 1);
        __syncthreads();  // a slice of K_j has been used
        load_queries(slice * kSlice);
        load_keys<kKeys>(shared.K, j, p.head_dim - slice * kSlice, slice * kSlice);
        wait_for_copies();
        __syncthreads();
      }
      load_keys<kValues>(shared.V, j, p.head_dim_v - first_column(), first_column());
      if (in_pages() && next < end) shared.places.find(p.pages, b, next, shared.band.keys);
      if (busy()) scores(num_slices() - 1);
      wait_for_copies();
      __syncthreads();  // V_j is there, K is free
      if (next < end) {
        if (kSliced<T, kD> && num_slices() > 1) load_queries(0);
        load_keys<kKeys>(shared.K, next, p.head_dim);
      }
      // Some row does not see some key.
      const bool cut = hides_pairs() || j < shared.all.first || j + kTileRows > shared.all.last;
      if (busy()) finish_scores(j, cut);
      bool careful = false;
      if (cut) {
        if (clear_not_finite(shared.V)) atomicMax(&shared.not_finite, static_cast<int>(j / kTileRows) + 1);
        __syncthreads();
        careful = shared.not_finite == static_cast<int>(j / kTileRows) + 1;
      }
      if (busy()) take_steps();
      if (careful && busy()) add_not_finite_values(j);
    }
    finish();
  }

 private:
  // Whether warpgroups compute the long sequences.
  __device__ bool beside_groups() const { return p.group_blocks > 0; }
  __device__ bool takes_scores() const { return kOptions && !p.softmax; }
  __device__ bool drops() const { return kOptions && p.dropout.on; }
  __device__ bool drops_late() const { return drops() && p.softmax; }  // when weights meet V
  __device__ bool hides_pairs() const { return kOptions && p.hides_pairs; }
  __device__ int local_row(int r) const { return warp * 16 + lane / 4 + 8 * r; }
  // Heads that share the tile have a query's rows side by side; the rows behind the last query of the tile are nobody's.
  __device__ int tile_queries() const { return p.tile_heads == 1 ? kBlockRows : kBlockRows / tile_heads(); }
  __device__ int tile_heads() const { return static_cast<int>(p.tile_heads); }
  __device__ int64_t query_of(int row) const { return query + (p.tile_heads == 1 ? row : row / tile_heads()); }
  __device__ int head_of(int row) const { return p.tile_heads == 1 ? h : h + row % tile_heads(); }
  __device__ int64_t row_index(int r) const { return query_of(local_row(r)); }
  __device__ bool is_of_tile(int64_t i) const { return i < query + tile_queries(); }
  // Whether the warp has queries: where they are few it brings keys alone.
  __device__ bool busy() const { return query_of(warp * 16) < shared.band.queries; }
  // Of V and O, that the block does.
  __device__ int first_column() const { return kColumns < kD ? static_cast<int>(blockIdx.z) * kColumns : 0; }
  __device__ int num_slices() const { return slices_of<T, kD>(p.head_dim); }
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
    if (in_pages()) return row_at(rows, h_kv, shared.places.of(j));
    return h_kv * rows.head + b * rows.batch + (shared.band.first_k + j) * rows.row;
  }

  __device__ void load_queries(int from) {
    const int64_t base = b * p.query.batch + shared.band.first_q * p.query.row + from * p.query.column;
    load_rows(shared.Q, p.query, p.head_dim - from, [&](int row) {
      const int64_t i = query_of(row);
      return i < shared.band.queries ? base + head_of(row) * p.query.head + i * p.query.row : kNoRow;
    });
  }

  enum Side { kKeys, kValues };

  __device__ StoredHead stored(Side side) const {
    const auto& problem = static_cast<const StoredProblem&>(p);
    return {side == kKeys ? problem.stored_key : problem.stored_value, h_kv};
  }
  __device__ StoredPlace stored_place_of(int64_t j) const {
    if (!in_pages()) return {b, shared.band.first_k + j};
    const KeyPlace place = shared.places.of(j);
    return {place.page, place.within};
  }

  // K_j or V_j
  template <Side kSide, int kWidth>
  __device__ void load_keys(Tile<T, kWidth>& tile, int64_t j, int columns, int from = 0) {
    const Rows& rows = kSide == kKeys ? p.key : p.value;
    const int64_t keys = shared.band.keys, skipped = from * rows.column;
    if constexpr (kStored) {
      load_stored_rows(tile, stored(kSide), from, from + columns, [&](int n) {
        return j + n < keys ? stored_place_of(j + n) : StoredPlace{-1, 0};
      });
    } else if (in_pages()) {
      load_rows(tile, rows, columns, [&](int n) {
        const int64_t row = j + n < keys ? row_of(rows, j + n) : kNoRow;
        return row == kNoRow ? row : row + skipped;
      });
    } else {
      load_rows_apart(tile, rows, columns, row_of(rows, j) + skipped, keys - j);
    }
  }

  // S += Q K^T of a slice of their columns; with the last of them S is whole, and times scale.
  __device__ void scores(int slice) {
    multiply_rows(S.x, shared.Q, warp * 16, shared.K, 0, p.head_dim - slice * kSlice, lane);
    if (slice < num_slices() - 1) return;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) S.x[n][e] = rounded_product(S.x[n][e], p.scale);
    }
  }

  // What options make of the scores of the tile at key j, and -inf where a key is hidden. `cut`: not every row sees every key.
  __device__ void finish_scores(int64_t j, bool cut) {
    if constexpr (kOptions) {
      for (int r = 0; r < 2; ++r) rows[r].keys = {shared.band.seen_by(p, row_index(r)), j};
      apply_options(j);
    } else if (cut) {
      for (int r = 0; r < 2; ++r) rows[r].keys = {shared.band.keys_of(row_index(r)), j};
      hide();
    }
    if (drops()) shared.kept.fill(p.dropout, b, h, query, j, false);
    if (takes_scores()) scores_as_weights();
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
    const int own[2] = {static_cast<int>(row_index(0) - query), static_cast<int>(row_index(1) - query)};
    const int other = lane % 4 * 2;
    shown = pairs_in<8>(rows[0].keys, rows[1].keys, other, sinks_from(j));
    shown = score.apply<T, false>(S.x, own, other, shown, [](int, int, float) {});
    if constexpr (kHasProgram) run_program(score, own, other);
    for (int r = 0; r < 2; ++r) rows[r].seen |= (shown & pairs_of_row(r)) != 0;
    for_each_pair<8>([&](int n, int e) {
      if (!(shown & bit_of_pair(n, e))) S.x[n][e] = p.softmax ? -INFINITY : 0;
    });
  }

  __device__ void run_program(const Score& score, const int (&own)[2], int other) {
#pragma unroll 1
    for (int key = other; key < kTileRows; key += 8) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!(shown & bit_of_pair(0, e))) continue;
        if (!score.run_program(S.x[0][e], own[e / 2], key + e % 2)) shown &= ~bit_of_pair(0, e);
      }
      rotate(S.x);
      shown = rotated_pairs<8>(shown);
    }
  }

  // S <- P = exp(S - m), O <- O exp(m_old - m) + P V, likewise l
  __device__ void take_steps() {
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      auto& of_step = reinterpret_cast<float(&)[8 / kSteps][4]>(S.x[n * 8 / kSteps]);
      if (!takes_scores()) {
        float alpha[2];
        softmax_step<T>(of_step, rows[0], rows[1], alpha);
        rescale_rows_of(O, alpha);
      }
      multiply(of_step, n * kTileRows / kSteps);
    }
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
    multiply_rows_of(O, alpha);
  }

  // O += P V of the keys of the tile from `first` on
  template <int kBlocks>
  __device__ void multiply(float (&P)[kBlocks][4], int first) {
    if constexpr (T::kOnTensorCores) {
      multiply_rounded(P, first);
    } else {
#pragma unroll
      for (int n = 0; n < kBlocks && drops_late(); ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!shared.kept.holds(local_row(e / 2), first + n * 8 + lane % 4 * 2 + e % 2)) P[n][e] = 0;
        }
      }
      multiply_weights(O, P, shared.V, first, lane);
    }
  }

  template <int kBlocks>
  __device__ void multiply_rounded(const float (&P)[kBlocks][4], int first) {
    constexpr bool kRest = T::kRestOfWeights;
    const unsigned of_V = shared.V.address(first + lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < kBlocks / 2; ++k) {
      unsigned whole[4], rest[4];
      round_weights<T>(P, k, rows[0], rows[1], whole, rest);
#pragma unroll
      for (int a = 0; a < 4 && drops_late(); ++a) {
        const unsigned keys = shared.kept.sixteen(local_row(a % 2), first / 16 + k) >> (a / 2 * 8 + lane % 4 * 2);
        const unsigned halves = (keys & 1 ? 0xffffu : 0) | (keys & 2 ? 0xffff0000u : 0);
        whole[a] &= halves;
        if constexpr (kRest) rest[a] &= halves;
      }
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        unsigned values[4];
        load_matrices_transposed(values, (of_V ^ 16 * n) + k * 16 * shared.V.kRowBytes);
        multiply_add<T>(O[n], whole, values[0], values[1]);
        multiply_add<T>(O[n + 1], whole, values[2], values[3]);
        if constexpr (kRest) {
          multiply_add<T>(O[n], rest, values[0], values[1]);
          multiply_add<T>(O[n + 1], rest, values[2], values[3]);
        }
      }
    }
  }

  // O += P V with the infinities and NaNs of V, which are not in shared memory.
  __device__ void add_not_finite_values(int64_t j) {
    const RowBits shown_to =
        kOptions ? RowBits::of<8>(lane, [&](int n, int e) { return shown >> (4 * n + e) & 1; }) : RowBits();
    if (drops_late()) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!shared.kept.holds(local_row(e / 2), n * 8 + lane % 4 * 2 + e % 2)) S.x[n][e] = 0;
        }
      }
    }
    const auto sees = [&](int r, int key) { return kOptions ? shown_to.hold(r, key) : rows[r].keys.holds(key); };
    const auto add = [&](const auto& values, const auto& row_at) {
      add_not_finite<T, kOptions>(O, S.x, values, shared.band.keys - j, first_column(), p.head_dim_v, lane, row_at,
                                  sees);
    };
    if constexpr (kStored) {
      add(stored(kValues), [&](int key) { return stored_place_of(j + key); });
    } else {
      add(p.value, [&](int key) { return row_of(p.value, j + key); });
    }
  }

  // O / l and L = m + log l, or what the merging kernel makes them of.
  __device__ void finish() {
    const Band& band = shared.band;
    if (takes_scores()) multiply_rows_of(O, {1 / rows[0].l, 1 / rows[1].l});
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      RowSums row;
      row.m = rows[r].m;
      row.l = sum_of_row(rows[r].l);
      row.l_rounded = T::kOnTensorCores ? sum_of_row(rows[r].l_rounded) : row.l;
      if (takes_scores()) row = {0, 0, 1};
      const Range keys = band.keys_of(row_index(r)), &part = shared.part;
      const bool sees = keys.first < part.last && part.first < keys.last && !keys.empty();
      const bool seen = kOptions ? sum_of_row(rows[r].seen ? 1 : 0) > 0 : sees && !part.empty();
      const int64_t i = row_index(r);
      if (i >= band.rows_q || !is_of_tile(i)) continue;
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
        if (column < p.head_dim_v) store_out(out + column * p.out.column, finished.out(O[n][2 * r + e]));
      }
    }
    if (p.logsumexp.data != nullptr && tells_statistics()) statistic(p.logsumexp, b, head, row) = finished.logsumexp();
  }

  __device__ void store_out(int64_t at, float x) const {
    if constexpr (kStored) {
      store_number(p.out.data, p.out.number, at, x);
    } else {
      store_sum<T>(p.out, at, x);
    }
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
  Memory& shared;
  int64_t query;  // the first of the tile
  int b, h;       // its sequence and head
  int h_kv;       // the head of its keys
  int lane, warp;
  Row rows[2];
  Scores S;
  unsigned shown = 0;  // with options: which of this lane's pairs of the tile are seen, bit 4 n + e
  float O[kColumns / 8][4] = {};
};

}  // namespace polyhead::cuda
