// Backward without options, of elements that tensor cores multiply: the two passes of attention_backward.cuh over the same
// tiles. Two warps share 32 of the block's rows, so that what a warp reads in shared memory serves two fragments; what it
// multiplies of its own rows it keeps in registers. In a step the warps of such a pair
//   pass over queries   make dS of 16 keys each, tell it the other, and sum over these 32 keys, first its own, half of dQ's columns
//   pass over keys      make P^T of 16 queries, or dP^T; told P^T, the latter makes dS^T; one sums dV, the other dK
#pragma once

#include "cuda/gradient_rows.cuh"
#include "cuda/products.cuh"

namespace polyhead::cuda {

// What a block reads, from the first row that some own row sees, down to a tile's edge.
struct Others {
  int tiles, heads;              // of each head; how many heads read the own keys, of queries 1
  int first_seen, last_seen;     // the tiles, exclusive, that all own rows see whole
  int64_t rows;                  // of a head, from that first one on
  int64_t first_element[2];      // where it begins in the first head, in both matrices
  int64_t first_L, first_delta;  // likewise, of queries
  int64_t begin;                 // its index in the sequence
};

template <class T, int kD>
struct PlainBackwardMemory {
  using Columns = Tile<T, kD, kTileRows, Layout::kPadded>;
  static constexpr int kWords = T::kRestOfWeights ? 8 : 4;

  Columns stages[2][2];  // of the others: one is on its way while the other is used; the own rows come in the second
  uint4 told[2][kThreads / 64][kWords][32];    // in steps by turns, by the warps of a pair, so many words of each lane
  float L[2][kTileRows], delta[2][kTileRows];  // of the others, where they are queries
  float2 L_and_delta[kTileRows];               // of the own rows, where they are
  int not_finite;  // 1 + the last tile of which some row must not see all: see hides_not_finite
  // Of the block, not held in registers
  OwnRows own;
  Band band;
  Others others;
};

template <class T, int kD, bool kKeys>
class PlainBackward {
  using Memory = PlainBackwardMemory<T, kD>;
  using Columns = typename Memory::Columns;
  static constexpr int kOwn = kKeys ? 1 : 2;            // matrices of whose rows a warp makes products
  static constexpr int kColumns = kKeys ? kD : kD / 2;  // that it sums
  static constexpr int kStep = kKeys ? 16 : 32;         // others
  static constexpr int kSixteens = 2;                   // rows
  using Factors = unsigned[kSixteens][4];               // a fragment A of each
  using Block = float[kSixteens][2][4];                 // of 16 others

 public:
  __device__ PlainBackward(const BackwardProblem& problem, Memory& memory)
      : p(problem),
        shared(memory),
        scale_log2(problem.scale * kLog2E),
        lane(static_cast<int>(threadIdx.x) % 32),
        pair(static_cast<int>(threadIdx.x) / 64),
        side(static_cast<int>(threadIdx.x) / 32 % 2),
        of_products(shared.stages[0][0].address(lane / 16 * 8 + lane % 8, lane / 8 % 2)),
        of_sums(shared.stages[0][0].address(lane % 16, lane / 16) + first_column() * sizeof(T)) {}

  __device__ void run() {
    prepare();
    Place here;
    if (is_there(here)) {
      load_own();
      load_others(here, 0);
      wait_for_copies();
      __syncthreads();
      keep_own();
    }
    for (; is_there(here); stage ^= 1) {
      wait_for_copies();
      __syncthreads();  // this stage is there, and nobody reads the other
      const Place next = behind(here);
      if (is_there(next)) load_others(next, stage ^ 1);
      const bool cut = here.tile < shared.others.first_seen || here.tile >= shared.others.last_seen;
      if (cut && hides_not_finite(1 + here.head * shared.others.tiles + here.tile)) {
#pragma unroll 1
        for (int from = 0; from < kTileRows; from += kStep) step<true>(here, from, true);
      } else {
#pragma unroll 1
        for (int from = 0; from < kTileRows; from += kStep) step<false>(here, from, cut);
      }
      here = next;
    }
    store();
  }

 private:
  // A tile of the others. The pass over queries has but one head of them.
  struct Place {
    int head = 0, tile = 0;
  };
  __device__ bool is_there(const Place& place) const {
    return kKeys ? place.head < shared.others.heads : place.tile < shared.others.tiles;
  }
  __device__ Place behind(const Place& place) const {
    if (!kKeys || place.tile + 1 < shared.others.tiles) return {place.head, place.tile + 1};
    return {place.head + 1, 0};
  }
  __device__ int64_t first_of(const Place& place) const {
    return shared.others.begin + int64_t{place.tile} * kTileRows;
  }

  __device__ static int64_t num_own(const Band& band) { return kKeys ? band.keys : band.queries; }
  // Of a lane's rows, two of each sixteen.
  __device__ int local_row(int r) const { return pair * 16 * kSixteens + lane / 4 + 8 * r; }
  __device__ int64_t row_index(int r) const { return shared.own.first + local_row(r); }
  __device__ static Range range_of(const Band& band, int64_t row) {
    return kKeys ? band.queries_of(row) : band.keys_of(row);
  }

  // What lies in shared memory but tiles.
  __device__ void prepare() {
    const OwnRows rows_of_block(p, kKeys);
    const int64_t own = rows_of_block.first;
    const Band band(p, rows_of_block.b);
    const int x = static_cast<int>(threadIdx.x);
    if (x == 0) {
      shared.not_finite = 0;
      shared.own = rows_of_block;
      shared.band = band;
      shared.others = others_of(rows_of_block, band);
    }
    if (!kKeys && x < kTileRows) {
      const bool there = own + x < band.queries;
      const int64_t i = band.first_q + own + x;
      const auto of_row = [&](const Statistic& of) {
        return there ? statistic(of, rows_of_block.b, rows_of_block.h, i) : 0;
      };
      shared.L_and_delta[x] = {kLog2E * of_row(p.logsumexp), of_row(p.delta)};
    }
    __syncthreads();
  }

  __device__ Others others_of(const OwnRows& own, const Band& band) const {
    const int64_t limit = num_own(band), behind_own = own.first + kBlockRows,
                  end_own = behind_own < limit ? behind_own : limit;
    const Range of_first = range_of(band, own.first), of_last = range_of(band, end_own - 1);
    const int64_t begin = of_first.first / kTileRows * kTileRows, end = own.first < end_own ? of_last.last : 0;
    const int group = static_cast<int>(p.heads / p.heads_kv), head = kKeys ? own.h * group : own.h / group;
    const int64_t first = (kKeys ? band.first_q : band.first_k) + begin;
    Others others;
    others.tiles = begin < end ? static_cast<int>((end - begin + kTileRows - 1) / kTileRows) : 0;
    others.heads = !kKeys ? 1 : begin < end ? group : 0;
    const int64_t seen = of_last.first - begin, seen_end = of_first.last - begin;
    others.first_seen = seen < 0 ? 0 : static_cast<int>((seen + kTileRows - 1) / kTileRows);
    others.last_seen = seen_end < 0 ? 0 : static_cast<int>(seen_end / kTileRows);
    others.begin = begin;
    others.rows = (kKeys ? band.queries : band.keys) - begin;
    const auto element_of = [&](const auto& x) { return own.b * x.batch + head * x.head + first * x.row; };
    for (int n = 0; n < 2; ++n) others.first_element[n] = element_of(matrix(n));
    others.first_L = element_of(p.logsumexp), others.first_delta = element_of(p.delta);
    return others;
  }
  // Of the others.
  __device__ const Rows& matrix(int n) const {
    if (kKeys) return n == 0 ? p.query : p.grad_out;
    return n == 0 ? p.key : p.value;
  }
  __device__ int columns_of(int n) const { return n == 0 ? p.head_dim : p.head_dim_v; }

  __device__ void load_own() {
    const Band& band = shared.band;
    const OwnRows own = shared.own;
    const int64_t origin = kKeys ? band.first_k : band.first_q, end = num_own(band);
    const Rows &first = kKeys ? p.key : p.query, &second = kKeys ? p.value : p.grad_out;
    load_tile(shared.stages[1][0], first, own.b, own.h, origin, own.first, end, p.head_dim);
    load_tile(shared.stages[1][1], second, own.b, own.h, origin, own.first, end, p.head_dim_v);
  }
  __device__ void keep_own() {
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const unsigned from = shared.stages[1][kKeys ? side : n].address(pair * 32 + lane % 16, lane / 16);
#pragma unroll
      for (int s = 0; s < kSixteens; ++s) {
#pragma unroll
        for (int k = 0; k < kD / 16; ++k) load_matrices(rows[n][s][k], from + 32 * k + s * 16 * Columns::kRowBytes);
      }
    }
  }

  __device__ void load_others(const Place& place, int to) {
    const int64_t row = int64_t{place.tile} * kTileRows, end = shared.others.rows - row;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const Rows& from = matrix(n);
      load_lines(shared.stages[to][n], from, columns_of(n),
                 shared.others.first_element[n] + place.head * from.head + row * from.row, end);
    }
    const int x = static_cast<int>(threadIdx.x);
    if (!kKeys || x >= kTileRows) return;
    const auto of_row = [&](const Statistic& of, int64_t first) {
      return x < end ? of.data[first + place.head * of.head + (row + x) * of.row] : 0;
    };
    shared.L[to][x] = kLog2E * of_row(p.logsumexp, shared.others.first_L);
    shared.delta[to][x] = of_row(p.delta, shared.others.first_delta);
  }

  template <bool kCareful>
  __device__ void step(const Place& here, int from, bool cut) {
    if constexpr (kKeys) {
      step_of_keys<kCareful>(here, from, cut);
    } else {
      step_of_queries<kCareful>(here, from, cut);
    }
  }

  template <bool kCareful>
  __device__ void step_of_queries(const Place& here, int from, bool cut) {
    Block S, dS;
    product(S, rows[0], 0, from + 16 * side);
    product(dS, rows[kOwn - 1], 1, from + 16 * side);
#pragma unroll
    for (int a = 0; a < kSixteens; ++a) {
      const float2 of_row[2] = {shared.L_and_delta[local_row(2 * a)], shared.L_and_delta[local_row(2 * a + 1)]};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float weight = exp2_approx(S[a][n][e] * scale_log2 - of_row[e / 2].x);
          dS[a][n][e] = weight * (dS[a][n][e] - of_row[e / 2].y);
        }
      }
    }
    if (cut) hide(dS, here, from + 16 * side);
    Factors whole, rest;
    round(dS, whole, rest);
    uint4(&told)[Memory::kWords][32] = shared.told[from / kStep % 2][pair];
    tell(told, 0, whole);
    if constexpr (T::kRestOfWeights) tell(told, 2, rest);
    if constexpr (kCareful) clear_others(from);
    multiply(whole, rest, 0, from + 16 * side);
    wait_for_other_warp();
    hear(told, 0, whole);
    if constexpr (T::kRestOfWeights) hear(told, 2, rest);
    multiply(whole, rest, 0, from + 16 * (1 - side));
    if constexpr (kCareful) add_not_finite(here, from, 0);
  }

  // C^T is Q K^T and then P, or dO V^T and then dS.
  template <bool kCareful>
  __device__ void step_of_keys(const Place& here, int from, bool cut) {
    Block C;
    product(C, rows[0], side, from);
    float4(&told)[kSixteens * 2][32] = reinterpret_cast<float4(&)[4][32]>(shared.told[from / kStep % 2][pair]);
    const int of_lane = from + lane % 4 * 2;
    if (side == 0) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 L = *reinterpret_cast<const float2*>(&shared.L[stage][of_lane + 8 * n]);
#pragma unroll
        for (int a = 0; a < kSixteens; ++a) {
#pragma unroll
          for (int e = 0; e < 4; ++e) C[a][n][e] = exp2_approx(C[a][n][e] * scale_log2 - (e % 2 == 0 ? L.x : L.y));
        }
      }
      if (cut) hide(C, here, from);
#pragma unroll
      for (int n = 0; n < 4; ++n)
        told[n][lane] = {C[n / 2][n % 2][0], C[n / 2][n % 2][1], C[n / 2][n % 2][2], C[n / 2][n % 2][3]};
    }
    wait_for_other_warp();
    if (side == 1) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 delta = *reinterpret_cast<const float2*>(&shared.delta[stage][of_lane + 8 * n]);
#pragma unroll
        for (int a = 0; a < kSixteens; ++a) {
          const float4 P = told[2 * a + n][lane];
          C[a][n][0] = P.x * (C[a][n][0] - delta.x), C[a][n][1] = P.y * (C[a][n][1] - delta.y);
          C[a][n][2] = P.z * (C[a][n][2] - delta.x), C[a][n][3] = P.w * (C[a][n][3] - delta.y);
        }
      }
      if (cut) hide(C, here, from);
    }
    const unsigned positive = kCareful ? positive_of(C) : 0;
    if constexpr (kCareful) clear_others(from);
    Factors whole, rest;
    round(C, whole, rest);
    multiply(whole, rest, 1 - side, from);
    if constexpr (kCareful) add_not_finite(here, from, positive);
  }

  // Where 16 rows from `from` on of matrix n of the others lie, behind where those of the first one do.
  __device__ unsigned offset(int n, int from) const {
    return static_cast<unsigned>((2 * stage + n) * sizeof(Columns) + from * Columns::kRowBytes);
  }

  // C = own rows times 16 others, of matrix n, from `from` on.
  __device__ void product(Block& C, const unsigned (&own_rows)[kSixteens][kD / 16][4], int n, int from) {
    const unsigned at = of_products + offset(n, from);
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      unsigned x[4];
      load_matrices(x, at + 32 * k);
#pragma unroll
      for (int s = 0; s < kSixteens; ++s) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (k == 0) {
            cuda::multiply<T>(C[s][n], own_rows[s][k], x[2 * n], x[2 * n + 1]);
          } else {
            multiply_add<T>(C[s][n], own_rows[s][k], x[2 * n], x[2 * n + 1]);
          }
        }
      }
    }
  }

  // sums += factors times 16 others, of matrix n, from `from` on. Of float16 factors are two numbers.
  __device__ void multiply(const Factors& whole, const Factors& rest, int n, int from) {
    const unsigned at = of_sums + offset(n, from);
#pragma unroll
    for (int c = 0; c < kColumns / 8; c += 2) {
      unsigned x[4];
      load_matrices_transposed(x, at + 16 * c);
#pragma unroll
      for (int s = 0; s < kSixteens; ++s) {
        multiply_add<T>(sums[s][c], whole[s], x[0], x[1]);
        multiply_add<T>(sums[s][c + 1], whole[s], x[2], x[3]);
        if constexpr (T::kRestOfWeights) {
          multiply_add<T>(sums[s][c], rest[s], x[0], x[1]);
          multiply_add<T>(sums[s][c + 1], rest[s], x[2], x[3]);
        }
      }
    }
  }

  __device__ static void round(const Block& C, Factors& whole, Factors& rest) {
#pragma unroll
    for (int s = 0; s < kSixteens; ++s) {
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const float low = C[s][a / 2][a % 2 * 2], high = C[s][a / 2][a % 2 * 2 + 1];
        whole[s][a] = packed<T>(low, high);
        if constexpr (T::kRestOfWeights) {
          rest[s][a] = packed<T>(low - low_half<T>(whole[s][a]), high - high_half<T>(whole[s][a]));
        }
      }
    }
  }

  // To the other warp of the pair, which has waited when it hears. Whole numbers come first, then what their rounding left.
  using Told = uint4[Memory::kWords][32];
  __device__ void tell(Told& told, int first_word, const Factors& x) const {
#pragma unroll
    for (int s = 0; s < kSixteens; ++s) {
      told[side * Memory::kWords / 2 + first_word + s][lane] = {x[s][0], x[s][1], x[s][2], x[s][3]};
    }
  }
  __device__ void hear(const Told& told, int first_word, Factors& x) const {
#pragma unroll
    for (int s = 0; s < kSixteens; ++s) {
      const uint4 four = told[(1 - side) * Memory::kWords / 2 + first_word + s][lane];
      x[s][0] = four.x, x[s][1] = four.y, x[s][2] = four.z, x[s][3] = four.w;
    }
  }
  __device__ void wait_for_other_warp() const { asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory"); }

  // C = 0 at pairs that are not seen.
  __device__ void hide(Block& C, const Place& here, int from) const {
    const int64_t first = first_of(here);
#pragma unroll
    for (int r = 0; r < 2 * kSixteens; ++r) {
      const TileRange seen(range_of(shared.band, row_index(r)), first);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (!seen.holds(from + n * 8 + lane % 4 * 2 + e)) C[r / 2][n][r % 2 * 2 + e] = 0;
        }
      }
    }
  }

  // Whether the others hold an infinity or a NaN: tensor cores would multiply it by the 0 of a row that does not see it.
  __device__ bool hides_not_finite(int tile) {
    bool found = has_not_finite(shared.stages[stage][0]);
    if constexpr (kKeys) found |= has_not_finite(shared.stages[stage][1]);
    if (found) atomicMax(&shared.not_finite, tile);
    __syncthreads();
    return shared.not_finite == tile;
  }
  __device__ void clear_others(int from) {
    __syncthreads();  // their products have been made
    clear_not_finite(shared.stages[stage][0], from, kStep);
    if constexpr (kKeys) clear_not_finite(shared.stages[stage][1], from, kStep);
    __syncthreads();
  }

  // Which of this lane's weights are above 0: bit 8 s + 4 n + e.
  __device__ static unsigned positive_of(const Block& C) {
    unsigned bits = 0;
#pragma unroll
    for (int n = 0; n < 8 * kSixteens; ++n) bits |= C[n / 8][n / 4 % 2][n % 4] > 0 ? 1u << n : 0;
    return bits;
  }

  // What infinities and NaNs add to the rows that see them: of grad_out what P makes of them, of a query or key a NaN, since
  // the score is none.
  __device__ void add_not_finite(const Place& here, int from, unsigned positive) {
    const int n = kKeys && side == 0 ? 1 : 0, columns = columns_of(n);
    const Rows& others = matrix(n);
    const int64_t in_others = here.tile * int64_t{kTileRows} + from, row = shared.others.begin + in_others;
    const int64_t of_row = shared.others.first_element[n] + here.head * others.head + in_others * others.row;
#pragma unroll 1
    for (int x = 0; x < kStep; ++x) {
      // Of the lane that has other x, at n = x / 8 and e = x % 2.
      const unsigned of_other = __shfl_sync(kAllLanes, positive, (lane & ~3) + x % 8 / 2) >> (x / 8 * 4 + x % 2);
      unsigned seen = 0;
#pragma unroll
      for (int r = 0; r < 2 * kSixteens; ++r) {
        seen |= range_of(shared.band, row_index(r)).holds(row + x) ? 1u << r : 0;
      }
      if (seen == 0) continue;
#pragma unroll 1
      for (int of_lane = lane % 4 * 2; of_lane < kColumns; of_lane += 8) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = first_column() + of_lane + e;
          const float v = column < columns ? element<T>(others, of_row + x * others.row + column * others.column) : 0;
#pragma unroll
          for (int r = 0; r < 2 * kSixteens; ++r) {
            const bool weighted = kKeys && side == 0 && (of_other >> (r / 2 * 8 + r % 2 * 2) & 1) != 0;
            if (v - v != 0 && (seen >> r & 1) != 0) sums[r / 2][0][r % 2 * 2 + e] += weighted ? v : NAN;
          }
        }
        for (int s = 0; s < kSixteens; ++s) rotate(sums[s]);
      }
    }
  }

  __device__ int first_column() const { return kKeys ? 0 : side * kColumns; }

  __device__ void store() {
    const Band& band = shared.band;
    const GradientRows to = gradient_rows<kKeys>(p, band, shared.own.b, shared.own.h, kKeys && side == 0);
#pragma unroll
    for (int s = 0; s < kSixteens; ++s) {
      const int64_t of_rows[2] = {row_index(2 * s), row_index(2 * s + 1)};
      const bool unseen[2] = {range_of(band, of_rows[0]).empty(), range_of(band, of_rows[1]).empty()};
      to.store(sums[s], of_rows, unseen, first_column(), lane);
    }
  }

  const BackwardProblem& p;
  Memory& shared;
  float scale_log2;               // for powers of 2 instead of e, as L in shared memory is
  int lane, pair, side;           // of the warp in its pair
  unsigned of_products, of_sums;  // where a lane's share of the first others lies in shared memory, as a fragment B
  int stage = 0;
  unsigned rows[kOwn][kSixteens][kD / 16][4];
  float sums[kSixteens][kColumns / 8][4] = {};
};

}  // namespace polyhead::cuda
