// The gradients of FlashAttention-2 (arXiv:2307.08691, section 3.1.2), with the words of sm_80. Its two sums run in two
// passes, each over tiles of its own: dQ over query tiles, dK and dV over key tiles. So no block adds to what another
// writes, and every sum has one order. P and dS: pairs.cuh. Without options, of 128 columns at most:
// attention_backward_plain.cuh in 16 bits, attention_backward_float32.cuh.
//   dX = dS times the derivative of softcap   dQ = scale dX K   dK = scale dX^T Q   dV = dropout(P)^T dO
//   pass over queries   own Q, dO   others K, V    sums dQ
//   pass over keys      own K, V    others Q, dO   sums dK, dV; of many columns one of both, in a pass each
// Of rows that are wider than shared memory has room for, a block sums one slice of columns: the last of those
// that it makes P and dS of.
#pragma once

#include <cmath>

#include "cuda/gradient_rows.cuh"
#include "cuda/pairs.cuh"

namespace polyhead::cuda {

// With 32 others at a time sums of many columns would be spilled: dK and dV of 128 264 bytes. In slices all of them.
template <class T, int kD, int kPass>
constexpr int kOthers = kSliced<T, kD>                               ? 64
                        : kD*(kPass == kOfKeyAndValue ? 2 : 1) > 128 ? 16
                                                                     : 32;

template <class T, int kD, int kPass, bool kExact, bool kOptions>  // see BackwardProblem, Problem
class Backward : Pairs<T, kD, kPass != kOfQuery, kOptions, kOthers<T, kD, kPass>> {
  static constexpr bool kKeys = kPass != kOfQuery;
  static constexpr bool kScored = kPass != kOfValue;                               // dQ or dK, in sums[0]
  static constexpr bool kWeighted = kPass == kOfKeyAndValue || kPass == kOfValue;  // dV, in the last of sums
  static constexpr int kStep = kOthers<T, kD, kPass>, kSums = kScored + kWeighted;
  static constexpr int kStages = PairsMemory<T, kD>::kStages, kColumns = kSliceColumns<T, kD>;
  using Base = Pairs<T, kD, kKeys, kOptions, kStep>;
  using Base::cut, Base::range, Base::range_of, Base::group, Base::row_index, Base::hides_pairs, Base::drops;
  using Base::p, Base::shared, Base::own, Base::b, Base::head, Base::first, Base::stage, Base::lane, Base::warp;
  using typename Base::Block;
  using Columns = typename PairsMemory<T, kD>::Columns;

 public:
  using Memory = PairsMemory<T, kD>;

  __device__ Backward(const BackwardProblem& problem, Memory& memory) : Base(problem, memory) {
    const OwnRows rows(p, kKeys);
    b = rows.b, h = head = rows.h, own = rows.first;
  }

  __device__ void run() {
    const Band band(p, b);
    const int64_t limit = num_own(band);
    const int64_t end_own = own + kBlockRows < limit ? own + kBlockRows : limit;
    const Range of_first = range_of(band, own), of_last = range_of(band, end_own - 1);
    const bool sinks = kOptions && kKeys && own < band.sinks;  // seen by queries to the last
    const int64_t begin = of_first.first / kTileRows * kTileRows,
                  end = own < end_own ? (sinks ? of_first : of_last).last : 0;
    int64_t before_gap = 0, gap = 0;
    if constexpr (kOptions && !kKeys) {
      before_gap = (band.sinks + kTileRows - 1) / kTileRows;
      const int64_t behind = band.behind_sinks(own), whole_tiles = (end + kTileRows - 1) / kTileRows * kTileRows;
      gap = (behind < whole_tiles ? behind : whole_tiles) - before_gap * kTileRows;
      if (gap < 0) gap = 0;
    }
    if (threadIdx.x == 0) {
      shared.not_finite = 0;
      shared.band = band;
      shared.all = {of_last.first, of_first.last};
      shared.begin = begin;
      shared.before_gap = static_cast<int>(before_gap);
      shared.gap = gap;
    }
    __syncthreads();
    tiles = begin < end ? static_cast<int>((end - begin - gap + kTileRows - 1) / kTileRows) : 0;
    const int all = kKeys ? tiles * static_cast<int>(group()) : tiles;  // of each query head that reads these keys
    if (!kSliced<T, kD> && all > 0) load_own(0);
    if constexpr (!kKeys) this->read_statistics(band);
    for (int t = kStages == 1 ? 0 : -1; t < all; ++t) {
      if constexpr (kStages == 1 && !kSliced<T, kD>) {
        __syncthreads();  // tile t - 1 has been used
        load_others(t);
      }
      wait_for_copies();
      __syncthreads();  // tile t is there, the other stage is free
      if (kStages == 2 && t + 1 < all) load_others(t + 1);
      if (t < 0) continue;
      first = first_of_tile(t);
      stage = t % kStages;
      cut = hides_pairs() || first < shared.all.first || first + kTileRows > shared.all.last;
      for (int r = 0; r < 2; ++r) {
        if constexpr (kOptions && !kKeys) {
          range[r] = {shared.band.seen_by(p, row_index(r)), first};
        } else {
          range[r] = {range_of(shared.band, row_index(r)), first};
        }
      }
      if constexpr (kKeys) head = h * static_cast<int>(group()) + t / tiles;
      this->draw();
      if constexpr (!kSliced<T, kD>) careful = cut && hides_not_finite(t + 1);
#pragma unroll 1
      for (int from = 0; from < kTileRows; from += kStep) step(t, from);
    }
    if constexpr (kScored) store(sums[0], false);
    if constexpr (kWeighted) store(sums[kSums - 1], true);
  }

 private:
  __device__ static int64_t num_own(const Band& band) { return kKeys ? band.keys : band.queries; }
  __device__ int64_t num_others() const { return kKeys ? shared.band.queries : shared.band.keys; }
  __device__ int64_t first_other() const { return kKeys ? shared.band.first_q : shared.band.first_k; }

  __device__ int64_t first_of_tile(int t) const {
    const int64_t other = shared.begin + t % tiles * kTileRows;
    if constexpr (!kOptions || kKeys) return other;
    return t < shared.before_gap ? other : other + shared.gap;
  }

  // Of the columns from `from` on.
  __device__ void load_own(int from) {
    const Band& band = shared.band;
    const int64_t origin = kKeys ? band.first_k : band.first_q, end = num_own(band);
    load_tile(shared.own[0], kKeys ? p.key : p.query, b, h, origin, own, end, p.head_dim, from);
    load_tile(shared.own[1], kKeys ? p.value : p.grad_out, b, h, origin, own, end, p.head_dim_v, from);
  }

  __device__ void load_others(int t, int from = 0) {
    const int64_t others = kKeys ? h * group() + t / tiles : h / group(), row = first_of_tile(t);
    const int to = t % kStages;
    load_tile(shared.others[to][0], kKeys ? p.query : p.key, b, others, first_other(), row, num_others(), p.head_dim,
              from);
    load_tile(shared.others[to][1], kKeys ? p.grad_out : p.value, b, others, first_other(), row, num_others(),
              p.head_dim_v, from);
    if (!kKeys || threadIdx.x >= kTileRows) return;
    const int x = static_cast<int>(threadIdx.x);
    const bool there = row + x < num_others();
    shared.L[to][x] = there ? this->statistic_or_0(p.logsumexp, others, first_other() + row + x) : 0;
    shared.delta[to][x] = there ? this->statistic_or_0(p.delta, others, first_other() + row + x) : 0;
  }

  // Whether the others hold an infinity or a NaN: tensor cores would multiply it by the 0 of a row that does not see it.
  __device__ bool hides_not_finite(int tile) {
    bool found = has_not_finite(shared.others[stage][0]);
    if constexpr (kKeys) found |= has_not_finite(shared.others[stage][1]);
    if (found) atomicMax(&shared.not_finite, tile);
    __syncthreads();
    return shared.not_finite == tile;
  }

  // The columns of sums that the block does.
  __device__ int first_column() const { return kSliced<T, kD> ? static_cast<int>(blockIdx.y) * kColumns : 0; }

  // The kStep others from first + from on, of tile t.
  __device__ void step(int t, int from) {
    Block P = {}, dS = {};
    if constexpr (kSliced<T, kD>) {
      products_of_slices(P, dS, t);
      careful = cut && hides_not_finite(t + 1);
    } else {
      this->products(P, 0, from);
      if constexpr (kScored) this->products(dS, 1, from);
    }
    if constexpr (kOptions) {
      const Score score = this->score_of_tile();
      this->template weights_by_options<true>(P, dS, from, score, [&](float before, float of_score, int i, int j) {
        return score.gradient(before, of_score, i, j);
      });
    } else {
      this->weights(P, dS, from);
    }
    if (careful) clear_others(from);
    if constexpr (kScored) multiply(sums[0], dS, shared.others[stage][0], from);
    if constexpr (kWeighted) multiply(sums[kSums - 1], P, shared.others[stage][1], from);
    if (careful) add_not_finite(P, dS, from);
  }

  // The slice of the block's sums comes last, and stays in shared memory.
  __device__ void products_of_slices(Block& P, Block& dS, int t) {
#pragma unroll 1
    for (int n = 1; n <= this->num_slices(); ++n) {
      const int slice = (static_cast<int>(blockIdx.y) + n) % this->num_slices();
      __syncthreads();  // the last slice has been used
      load_own(slice * kColumns);
      load_others(t, slice * kColumns);
      wait_for_copies();
      __syncthreads();
      this->products(P, 0, 0, slice);
      if constexpr (kScored) this->products(dS, 1, 0, slice);
    }
  }

  // sum += factors [16, kStep] others [kStep, kColumns]
  __device__ void multiply(float (&sum)[kColumns / 8][4], Block& factors, Columns& others, int from) {
    if constexpr (kExact) {
      multiply_exactly(sum, factors, others, from);
    } else if constexpr (T::kOnTensorCores) {
      multiply_rounded(sum, factors, others, from);
    } else {
      multiply_weights(sum, factors, others, from, lane);
    }
  }

  __device__ void multiply_rounded(float (&sum)[kColumns / 8][4], const Block& factors, Columns& others, int from) {
    const unsigned of_others = others.address(from + lane % 16, lane / 16);
    constexpr bool kRest = T::kRestOfWeights;
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
      unsigned whole[4], rest[4];
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const float low = factors[2 * k + a / 2][a % 2 * 2], high = factors[2 * k + a / 2][a % 2 * 2 + 1];
        whole[a] = packed<T>(low, high);
        if constexpr (kRest) rest[a] = packed<T>(low - low_half<T>(whole[a]), high - high_half<T>(whole[a]));
      }
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        unsigned x[4];
        load_matrices_transposed(x, (of_others ^ 16 * n) + k * 16 * others.kRowBytes);
        multiply_add<T>(sum[n], whole, x[0], x[1]);
        multiply_add<T>(sum[n + 1], whole, x[2], x[3]);
        if constexpr (kRest) {
          multiply_add<T>(sum[n], rest, x[0], x[1]);
          multiply_add<T>(sum[n + 1], rest, x[2], x[3]);
        }
      }
    }
  }

  // The same with factors in two numbers, of 16 (float16 22) bits, times a power of two of their row.
  __device__ void multiply_exactly(float (&sum)[kColumns / 8][4], const Block& factors, Columns& others, int from) {
    float up[2], down[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = 0;
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n) {
        largest = fmaxf(largest, fmaxf(fabsf(factors[n][2 * r]), fabsf(factors[n][2 * r + 1])));
      }
      up[r] = power_for(max_of_row(largest));
      down[r] = one_over_power(up[r]);
    }
    unsigned whole[kStep / 16][4], rest[kStep / 16][4];
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const float low = up[a % 2] * factors[2 * k + a / 2][a % 2 * 2],
                    high = up[a % 2] * factors[2 * k + a / 2][a % 2 * 2 + 1];
        whole[k][a] = packed<T>(low, high);
        rest[k][a] = packed<T>(low - low_half<T>(whole[k][a]), high - high_half<T>(whole[k][a]));
      }
    }
    const unsigned of_others = others.address(from + lane % 16, lane / 16);
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 2) {
      float product[2][4] = {};
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k) {
        unsigned x[4];
        load_matrices_transposed(x, (of_others ^ 16 * n) + k * 16 * others.kRowBytes);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          multiply_add<T>(product[c], rest[k], x[2 * c], x[2 * c + 1]);
          multiply_add<T>(product[c], whole[k], x[2 * c], x[2 * c + 1]);
        }
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[n + e / 4][e % 4] += down[e / 2 % 2] * product[e / 4][e % 4];
    }
  }

  __device__ void clear_others(int from) {
    __syncthreads();  // their products have been made
    clear_not_finite(shared.others[stage][0], from, kStep);
    if constexpr (kKeys) clear_not_finite(shared.others[stage][1], from, kStep);
    __syncthreads();
  }

  // What infinities and NaNs add to the rows that see them, of a query or key what dS makes of them (with a softmax it is 0
  // or NaN there), of grad_out what P does.
  __device__ void add_not_finite(const Block& P, const Block& dS, int from) {
    const RowBits shown = kOptions ? this->shown_pairs() : RowBits();
    const auto sees = [&](int r, int x) { return kOptions ? shown.hold(r, x) : this->sees(r, from + x); };
    const Signs<kOptions> of_scores(dS, lane), of_weights(P, lane);
    const int64_t others = kKeys ? head : head / group(), row = first_other() + first + from;
    const Rows &scored = kKeys ? p.query : p.key, &weighted = p.grad_out;  // the latter in the pass over keys
#pragma unroll 1
    for (int x = 0; x < kStep; ++x) {
#pragma unroll 1
      for (int of_lane = lane % 4 * 2; of_lane < kColumns; of_lane += 8) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = first_column() + of_lane + e % 2;
          if (!sees(e / 2, x)) continue;
          if constexpr (kScored) {
            const float v = column < p.head_dim ? at(scored, others, row + x, column) : 0;
            if (v - v != 0) sums[0][0][e] += of_scores.times(e / 2, x, v);
          }
          if constexpr (kWeighted) {
            const float v = column < p.head_dim_v ? at(weighted, others, row + x, column) : 0;
            if (v - v != 0) sums[kSums - 1][0][e] += of_weights.times(e / 2, x, v);
          }
        }
        rotate(sums[0]);
        if constexpr (kSums == 2) rotate(sums[1]);
      }
    }
  }

  __device__ float at(const Rows& rows, int64_t of_head, int64_t row, int column) const {
    return element<T>(rows, b * rows.batch + of_head * rows.head + row * rows.row + column * rows.column);
  }

  __device__ void store(float (&sum)[kColumns / 8][4], bool values) {
    const Band& band = shared.band;
    const int64_t of_rows[2] = {row_index(0), row_index(1)};
    const bool unseen[2] = {range_of(band, of_rows[0]).empty(), range_of(band, of_rows[1]).empty()};
    gradient_rows<kKeys>(p, band, b, h, values).store(sum, of_rows, unseen, first_column(), lane);
  }

  int h;  // of the own rows
  int tiles = 0;
  bool careful = false;
  float sums[kSums][kColumns / 8][4] = {};
};

}  // namespace polyhead::cuda
