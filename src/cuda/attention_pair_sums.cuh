// Sums over pairs: gradients of what is added to scores, of dS over the pairs that share an element of the bias, and over
// all pairs of a head for a slope of ALiBi, and of sinks; returned weights and their sums over queries. P and dS: pairs.cuh.
//   dbias = sum dS   dslope = -sum dS |i + offset - j|   dsink = sum_i exp(sink - L) (dL - D) = -sum_i exp(sink - L) delta
//   weights = dropout(P), or their mean over heads   column sums = sum_i P
// A block owns a tile of 64 x 64 elements of the result, less where that broadcasts, and walks over the tiles of pairs
// whose sum it is. Where few blocks would have all the work, several share a tile of the result, each with a part of its
// pairs, and a second kernel adds what they found in order.
#pragma once

#include "cuda/pages.cuh"
#include "cuda/pairs.cuh"
#include "cuda/stored.cuh"

namespace polyhead::cuda {

// kStored: of weights alone, of keys as they are stored.
template <class T, int kD, bool kStored = false>
struct PairSumsMemory {
  PairsMemory<T, kD, kStored ? 1 : 2> pairs;
  union {
    KeyPlace places[kTileRows];               // of the keys of a tile, in pages
    float columns[kThreads / 32][kTileRows];  // in the end: sums over the rows of a warp
  };
};

// Number n of dims[0] x dims[1] x dims[2] x dims[3]: a tile of pairs, or of the result.
struct Place {
  int64_t b, h, query_tile, key_tile;
};
__device__ inline Place place_of(int64_t n, const int64_t (&dims)[4]) {
  const int64_t key_tile = n % dims[3], query_tiles = n / dims[3], heads = query_tiles / dims[2];
  return {heads / dims[1], heads % dims[1], query_tiles % dims[2], key_tile};
}

// Element (i, j) of a tile of the result.
__device__ inline void put(const BackwardProblem& p, const PairSums& sums, int64_t tile, int i, int j, float sum) {
  const Place at = place_of(tile, sums.own);
  const int64_t row = at.query_tile * kTileRows + i, column = at.key_tile * kTileRows + j;
  if ((sums.by_query && row >= p.seqlen_q) || (sums.by_key && column >= p.seqlen_k)) return;
  const Broadcast& to = sums.result;
  const int64_t element = at.b * to.batch + at.h * to.head + row * to.query + column * to.key;
  sum /= sums.divisor;
  if (p.accumulate) sum += load_number(to.data, to.number, element);
  store_number(to.data, to.number, element, sum);
}

// Tiles of pairs of any queries and keys, one after the other. kStored: the problem is a StoredWeightsProblem.
template <class T, int kD, bool kStored = false>
class PairTiles : protected Pairs<T, kD, false, true, kTileRows, kStored ? 1 : 2> {
 protected:
  using Base = Pairs<T, kD, false, true, kTileRows, kStored ? 1 : 2>;
  using Base::p, Base::shared, Base::own, Base::b, Base::head, Base::first, Base::lane, Base::warp;
  using Base::range, Base::row_index, Base::local_row;
  using typename Base::Block;

  __device__ PairTiles(const BackwardProblem& problem, PairSumsMemory<T, kD, kStored>& memory)
      : Base(problem, memory.pairs), places(memory.places) {
    own = -1;  // no tile of queries is there yet
  }

  // P, and where they are wanted what gradient(score, score before the program, dS, i, j) says of dS. Returns whether some
  // pair may be seen.
  template <class Gradient>
  __device__ bool compute(const Place& at, Block& P, Block& dS, bool gradients, const Gradient& gradient) {
    const Band band(p, at.b);
    const bool loaded = !kSliced<T, kD> && own == at.query_tile * kTileRows && b == at.b && head == at.h;
    own = at.query_tile * kTileRows, b = static_cast<int>(at.b), head = static_cast<int>(at.h);
    first = at.key_tile * kTileRows;
    const int64_t end = own + kTileRows < band.queries ? own + kTileRows : band.queries;
    const bool gap = first >= band.sinks && first < band.behind_sinks(own);
    const bool some =
        own < end && !gap && band.keys_of(own).first < first + kTileRows && first < band.keys_of(end - 1).last;
    __syncthreads();  // the last tiles have been used
    if (threadIdx.x == 0) shared.band = band;
    if (!loaded) this->read_statistics(band);
    if (!loaded && !kSliced<T, kD>) load_queries(band, end, gradients, 0);
    if (!some) return false;
    for (int r = 0; r < 2; ++r) range[r] = {band.seen_by(p, row_index(r)), first};
    this->draw();
#pragma unroll 1
    for (int slice = 0; slice < this->num_slices(); ++slice) {
      if (slice > 0) __syncthreads();  // the last one has been used
      if (kSliced<T, kD>) load_queries(band, end, gradients, slice * kColumns);
      load_keys(band, gradients, slice * kColumns);
      wait_for_copies();
      __syncthreads();
      this->products(P, 0, 0, slice);
      if (gradients) this->products(dS, 1, 0, slice);
    }
    const Score score = this->score_of_tile();
    this->template weights_by_options<false>(P, dS, 0, score, [&](float before, float of_score, int i, int j) {
      return gradient(score, before, of_score, i, j);
    });
    return true;
  }

 private:
  static constexpr int kColumns = kSliceColumns<T, kD>;

  // Of the columns from `from` on.
  __device__ void load_queries(const Band& band, int64_t end, bool gradients, int from) {
    load_tile(shared.own[0], p.query, b, head, band.first_q, own, end, p.head_dim, from);
    if constexpr (!kStored) {
      if (gradients) load_tile(shared.own[1], p.grad_out, b, head, band.first_q, own, end, p.head_dim_v, from);
    }
  }
  __device__ bool in_pages() const { return p.pages.table != nullptr; }
  __device__ void load_keys(const Band& band, bool gradients, int from) {
    const int64_t h_kv = head / this->group();
    if (in_pages()) find_places(band.keys);
    if constexpr (kStored) {
      load_stored_keys(h_kv, band, from);
    } else {
      if (in_pages()) {
        load_keys_in_pages(h_kv, band.keys, from);
      } else {
        load_tile(shared.others[0][0], p.key, b, h_kv, band.first_k, first, band.keys, p.head_dim, from);
      }
      if (gradients) {
        load_tile(shared.others[0][1], p.value, b, h_kv, band.first_k, first, band.keys, p.head_dim_v, from);
      }
    }
  }
  __device__ void find_places(int64_t keys) {
    const int row = static_cast<int>(threadIdx.x);
    if (row < kTileRows && first + row < keys) places[row] = place_of_key(p.pages, b, first + row);
    __syncthreads();
  }
  __device__ void load_keys_in_pages(int64_t h_kv, int64_t keys, int from) {
    load_rows(shared.others[0][0], p.key, p.head_dim - from, [&](int n) {
      const int64_t begin = first + n < keys ? row_at(p.key, h_kv, places[n]) : kNoRow;
      return begin == kNoRow ? kNoRow : begin + from * p.key.column;
    });
  }
  __device__ void load_stored_keys(int64_t h_kv, const Band& band, int from) {
    const StoredHead key{static_cast<const StoredWeightsProblem&>(p).stored_key, h_kv};
    load_stored_rows(shared.others[0][0], key, from, p.head_dim, [&](int n) -> StoredPlace {
      if (first + n >= band.keys) return {-1, 0};
      if (in_pages()) return {places[n].page, places[n].within};
      return {b, band.first_k + first + n};
    });
  }

  KeyPlace (&places)[kTileRows];
};

template <class T, int kD, bool kStored = false>
class SumsOfPairs : PairTiles<T, kD, kStored> {
  using Base = PairTiles<T, kD, kStored>;
  using Base::p, Base::lane, Base::warp, Base::local_row;
  using typename Base::Block;

 public:
  using Memory = PairSumsMemory<T, kD, kStored>;

  __device__ SumsOfPairs(const BackwardProblem& problem, const PairSums& pair_sums, Memory& memory)
      : Base(problem, memory), sums(pair_sums), columns(memory.columns) {}

  __device__ void run() {
    tile = blockIdx.x / sums.parts;
    part = blockIdx.x % sums.parts;
    const Place to = place_of(tile, sums.own);
    int64_t others[4] = {sums.others[0], sums.others[1], sums.others[2], sums.others[3]};
    const int64_t b0 = to.b + part % sums.sequences, parts = sums.parts / sums.sequences, index = part / sums.sequences;
    int64_t pairs = sums.pairs;
    if (p.packed) {  // only here is known how many tiles a sequence has
      const Band band(p, b0);
      others[0] = 1;
      others[2] = (band.queries + kTileRows - 1) / kTileRows;
      others[3] = (band.keys + kTileRows - 1) / kTileRows;
      pairs = others[1] * others[2] * others[3];
    }
    for (int64_t n = pairs * index / parts; n < pairs * (index + 1) / parts; ++n) {
      Place at = place_of(n, others);
      at.b += b0, at.h += to.h, at.query_tile += to.query_tile, at.key_tile += to.key_tile;
      add(at);
    }
    if (sums.by_query && sums.by_key) {
      store_elements();
    } else if (sums.by_query) {
      store_rows();
    } else {
      store_columns();
    }
  }

 private:
  __device__ void add(const Place& at) {
    const bool gradients = !kStored && (sums.summed == Summed::kGradient || sums.summed == Summed::kSlopeGradient);
    Block P = {}, dS = {};
    const bool some =
        this->compute(at, P, dS, gradients, [&](const Score& score, float before, float of_score, int i, int j) {
          const float gradient = score.gradient(before, of_score, i, j);
          return sums.summed == Summed::kSlopeGradient ? -gradient * score.distance(i, j) : gradient;
        });
    if (!some) return;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][e] += gradients ? dS[n][e] : P[n][e];
    }
  }

  __device__ void store(int i, int j, float x) {
    if (sums.partial == nullptr) return put(p, sums, tile, i, j, x);
    sums.partial[((part * sums.tiles + tile) * sums.rows() + i) * sums.columns() + j] = x;
  }

  __device__ void store_elements() {
#pragma unroll 1
    for (int column = lane % 4 * 2; column < kTileRows; column += 8) {
#pragma unroll
      for (int e = 0; e < 4; ++e) store(local_row(e / 2), column + e % 2, sum[0][e]);
      rotate(sum);
    }
  }

  __device__ void store_rows() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) row += sum[n][2 * r] + sum[n][2 * r + 1];
      row = sum_of_row(row);
      if (lane % 4 == 0) store(local_row(r), 0, row);
    }
  }

  __device__ void store_columns() {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float column = sum[n][e] + sum[n][e + 2];
        for (int lanes = 4; lanes < 32; lanes *= 2) column += __shfl_xor_sync(kAllLanes, column, lanes);
        if (lane < 4) columns[warp][n * 8 + lane * 2 + e] = column;
      }
    }
    __syncthreads();
    const int x = static_cast<int>(threadIdx.x);
    if (x < kTileRows) {
      for (int w = 1; w < kThreads / 32; ++w) columns[0][x] += columns[w][x];
      if (sums.by_key) store(0, x, columns[0][x]);
    }
    __syncthreads();
    if (sums.by_key || x > 0) return;
    float all = 0;
    for (int column = 0; column < kTileRows; ++column) all += columns[0][column];
    store(0, 0, all);
  }

  const PairSums& sums;
  float (&columns)[kThreads / 32][kTileRows];
  int64_t tile = 0, part = 0;
  Block sum = {};
};

// Slices of columns take all head dims, and little shared memory.
using StoredWeights = SumsOfPairs<Float32, kManyColumns, true>;

// How many integers 1 is of a capture: a power of two, as two factors.
struct Units {
  float factors[2];

  __device__ Units(const CaptureSums& sums, int capture) {
    const int exponent = static_cast<int>(sums.largest[capture] >> 23) - 126;  // that of the next power of two
    const int power = 62 - sums.log2_terms - exponent, half = power / 2;
    factors[0] = __uint_as_float(static_cast<unsigned>(127 + half) << 23);
    factors[1] = __uint_as_float(static_cast<unsigned>(127 + power - half) << 23);
  }
  __device__ long long of(float x) const { return __float2ll_rn(x * factors[0] * factors[1]); }
  __device__ float number(long long units) const {
    return static_cast<float>(units) * one_over_power(factors[0]) * one_over_power(factors[1]);
  }
};

// Sums that any block may add to, in any order: as integers, whose sums have no order. The first launch finds the largest
// gradient, by which the unit of the second is chosen.
template <class T, int kD>
class CaptureGradients : PairTiles<T, kD> {
  using Base = PairTiles<T, kD>;
  using Base::p, Base::lane, Base::shared;
  using typename Base::Block;
  using Sum = unsigned long long;  // of integers, modulo 2^64

 public:
  using Memory = PairSumsMemory<T, kD>;

  __device__ CaptureGradients(const BackwardProblem& problem, const CaptureSums& capture_sums, Memory& memory)
      : Base(problem, memory), sums(capture_sums) {}

  __device__ void run() {
    const OwnRows rows(p, false);
    const Band band(p, rows.b);
    const int64_t end_q = rows.first + kTileRows < band.queries ? rows.first + kTileRows : band.queries;
    const int64_t end = rows.first < end_q ? band.keys_of(end_q - 1).last : 0;
    for (int64_t j = band.keys_of(rows.first).first / kTileRows; j * kTileRows < end; ++j) {
      Block P = {}, dS = {};
      this->compute({rows.b, rows.h, rows.first / kTileRows, j}, P, dS, true,
                    [&](const Score& score, float before, float of_score, int q, int k) {
                      score.gradients_of_captures(
                          before, of_score, q, k,
                          [&](int gather, bool uniform, int capture, int64_t element, float gradient) {
                            if (sums.gradients[capture].data != nullptr)
                              add(gather, uniform, capture, element, gradient);
                          });
                      return 0.f;
                    });
    }
    finish();
  }

 private:
  __device__ void add(int gather, bool uniform, int capture, int64_t element, float gradient) {
    const bool finite = gradient - gradient == 0;
    if (!sums.adds) {
      if (finite) largest[capture] = fmaxf(largest[capture], fabsf(gradient));
      return;
    }
    const int64_t at = sums.first[capture] + element;
    if (!finite) {
      atomicOr(sums.not_finite + at, gradient > 0 ? 1u : gradient < 0 ? 2u : 4u);
      return;
    }
    const auto units = static_cast<Sum>(Units(sums, capture).of(gradient));
    if (uniform) {
      of_head[gather] += units;
      element_of_head[gather] = at;
    } else if (units != 0) {
      atomicAdd(sums.sums + at, units);
    }
  }

  __device__ void finish() {
#pragma unroll
    for (int c = 0; c < kMostCaptures; ++c) {
      if (largest[c] > 0) atomicMax(sums.largest + c, __float_as_uint(largest[c]));
    }
#pragma unroll
    for (int n = 0; n < ScoreProgram::kGathers; ++n) {
      if (of_head[n] != 0) atomicAdd(sums.sums + element_of_head[n], of_head[n]);
    }
  }

  const CaptureSums& sums;
  float largest[kMostCaptures] = {};
  Sum of_head[ScoreProgram::kGathers + 1] = {};
  int64_t element_of_head[ScoreProgram::kGathers + 1] = {};
};

}  // namespace polyhead::cuda
