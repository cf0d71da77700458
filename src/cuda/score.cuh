// What options make of scores, and which keys they hide, of a lane's pairs of queries and keys at once:
//   S = softcap tanh(X / softcap) + bias - slope |i + offset - j|   X = scale Q K^T; hidden: mask is false or bias -inf
// or what a program makes of that (program.cuh), and which weights dropout keeps. Branches on options are taken by all
// threads alike.
#pragma once

#include <cmath>

#include "core/philox.h"
#include "cuda/band.cuh"
#include "cuda/numbers.cuh"
#include "cuda/program.cuh"
#include "cuda/tile.cuh"

namespace polyhead::cuda {

// Of head h. +inf is NaN already, as it would be in a softmax.
__device__ inline float sink_of(const Problem& p, int64_t h) {
  const float sink = p.sinks[h * p.sinks_stride];
  return sink < INFINITY ? sink : NAN;
}

// A lane's pairs in a tile of scores (mma.cuh): element [n][e] is of its own row e / 2, and of other `other` + 8 n + e % 2. As
// bits 4 n + e they tell which of them are seen.
template <int kBlocks, class F>
__device__ inline void for_each_pair(const F& f) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) f(n, e);
  }
}
__device__ constexpr unsigned bit_of_pair(int n, int e) { return 1u << (4 * n + e); }

// Of one row, those whose others are below x, counted from the lane's first.
template <int kBlocks>
__device__ inline unsigned pairs_below(int x) {
  const int in_block = x & 7, n = (x >> 3) * 2 + (in_block < 2 ? in_block : 2);
  const unsigned first = n <= 0 ? 0 : n >= 2 * kBlocks ? (1u << 2 * kBlocks) - 1 : (1u << n) - 1;
  unsigned apart = (first | first << 8) & 0x00ff00ff;  // bits 2 n + e become bits 4 n + e
  apart = (apart | apart << 4) & 0x0f0f0f0f;
  return (apart | apart << 2) & 0x33333333;
}
// Of both, those that the ranges of the rows hold, and the first `sinks` of the tile in front of them.
template <int kBlocks>
__device__ inline unsigned pairs_in(const TileRange& row0, const TileRange& row1, int other, int sinks) {
  unsigned pairs = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const TileRange& row = r == 0 ? row0 : row1;
    const unsigned before = pairs_below<kBlocks>(row.first - other) & ~pairs_below<kBlocks>(sinks - other);
    pairs |= (pairs_below<kBlocks>(row.last - other) & ~before) << 2 * r;
  }
  return pairs;
}

// Those of block n + 1 become those of block n, as rotate() does it with elements.
template <int kBlocks>
__device__ constexpr unsigned rotated_pairs(unsigned pairs) {
  if constexpr (kBlocks == 8) return pairs >> 4 | pairs << 28;
  return (pairs >> 4 | pairs << 4 * (kBlocks - 1)) & ((1u << 4 * kBlocks) - 1);
}
__device__ constexpr unsigned pairs_of_row(int r) { return 0x33333333u << 2 * r; }

// tanh x. Of what tensor cores multiplied without a branch: near 0 by a polynomial, whose coefficients are a least-squares fit that
// was weighted until the largest error was 4e-8 of tanh x.
template <class T>
__device__ inline float tanh_of(float x) {
  if constexpr (!T::kOnTensorCores) return tanhf(x);
  const float y = exp2_approx(fabsf(x) * (-2 * kLog2E)), square = x * x;
  float near = fmaf(square, 0.016273949f, -0.052586894f);
  near = fmaf(near, square, 0.133194208f);
  near = fmaf(near, square, -0.333328903f) * square;
  return fabsf(x) < 0.55f ? fmaf(near, x, x) : copysignf(__fdividef(1 - y, 1 + y), x);
}

constexpr bool kHasProgram = ScoreProgram::kHasMask || ScoreProgram::kHasScore;

// Of one head, the queries from first_query on and the keys from first_key on, which pairs are counted from.
class Score {
 public:
  __device__ Score(const Problem& problem, const Band& band, int64_t b, int64_t h, int64_t first_query,
                   int64_t first_key)
      : p(problem),
        program(problem.captures, b, h, band.offset),
        q(first_query),
        k(first_key),
        bias_at(at(p.bias, b, h, first_query, first_key)) {
    const int64_t before_mask = p.mask_keys < 0 ? 0 : band.keys - p.mask_keys, offset = band.offset;
    mask_at = at(p.mask, b, h, first_query, first_key - before_mask);
    mask_from = TileRange::bounded(before_mask - first_key);
    whole = first_key + kTileRows <= band.keys && mask_from == 0;
    last_query = TileRange::bounded(band.queries - 1 - first_query);
    if (p.slopes.data == nullptr) return;
    slope = static_cast<const float*>(p.slopes.data)[b * p.slopes.batch + h * p.slopes.head];
    // Offsets may be any int64. Beside a far one the place of the tile is below its rounding.
    const bool far = offset > kFar || offset < -kFar;
    position = static_cast<float>(far ? offset : first_query + offset - first_key);
  }

  // X -> the scores before the program, of own queries, or with kKeys of own keys. Returns which pairs are visible of those that
  // are `seen`. derivative(n, e, of the softcap's result by X)
  template <class T, bool kKeys, int kBlocks, class Derivative>
  __device__ unsigned apply(float (&x)[kBlocks][4], const int (&own)[2], int other, unsigned seen,
                            const Derivative& derivative) const {
    if (p.mask.data != nullptr) seen = shown<kKeys, kBlocks>(own, other, seen);
    if (p.softcap > 0) {
      const float one_over = fminf(1 / p.softcap, 3e38f);
      for_each_pair<kBlocks>([&](int n, int e) {
        const float t = tanh_of<T>(T::kOnTensorCores ? x[n][e] * one_over : x[n][e] / p.softcap);
        x[n][e] = p.softcap * t;
        derivative(n, e, 1 - t * t);
      });
    }
    if (p.slopes.data != nullptr) {
      const float apart[2] = {static_cast<float>(own[0] - other), static_cast<float>(own[1] - other)};
      for_each_pair<kBlocks>([&](int n, int e) {
        const float between = apart[e / 2] - static_cast<float>(8 * n + e % 2);  // exact
        x[n][e] -= slope * fabsf(position + (kKeys ? -between : between));
      });
    }
    if (p.bias.data != nullptr) {
      seen = p.bias.number == Number::kBFloat16  ? add_bias<BFloat16, kKeys>(x, own, other, seen)
             : p.bias.number == Number::kFloat16 ? add_bias<Float16, kKeys>(x, own, other, seen)
                                                 : add_bias<Float32, kKeys>(x, own, other, seen);
    }
    return seen;
  }

  // Of a visible pair: x <- what the program makes of it. Returns whether it is still visible.
  __device__ bool run_program(float& x, int i, int j) const {
    if (!program.shows(q + i, k + j)) return false;
    if constexpr (ScoreProgram::kHasScore) x = program.score(x, q + i, k + j);
    return !ScoreProgram::kHasScore || x != -INFINITY;
  }
  // The gradient of the score before the program.
  __device__ float gradient(float before, float of_score, int i, int j) const {
    if constexpr (ScoreProgram::kHasScore) return program.gradient(before, of_score, q + i, k + j);
    return of_score;
  }
  // add(...) for each element of captures that the pair read: program.cuh.
  template <class Add>
  __device__ void gradients_of_captures(float before, float of_score, int i, int j, const Add& add) const {
    program.gradients_of_captures(before, of_score, q + i, k + j, add);
  }

  // |i + offset - j|
  __device__ float distance(int i, int j) const { return fabsf(position + static_cast<float>(i - j)); }

 private:
  __device__ static int64_t at(const Broadcast& x, int64_t b, int64_t h, int64_t i, int64_t j) {
    return b * x.batch + h * x.head + i * x.query + j * x.key;
  }

  // f(n, e, its element) of a lane's pairs that are seen, and of others, where this takes fewer loads: of elements, two at a time.
  template <class E, bool kKeys, int kBlocks, class F>
  __device__ void for_each_element(const Broadcast& of, int64_t begin, const int (&own)[2], int other, unsigned seen,
                                   const F& f) const {
    const int64_t of_own = kKeys ? of.key : of.query, of_others = kKeys ? of.query : of.key;
    const auto* const data = static_cast<const E*>(of.data) + begin + other * of_others;
    if (!kKeys && in_twos<E>(of, begin)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const E* const row = data + (own[r] < last_query ? own[r] : last_query) * of_own;
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const auto two = *reinterpret_cast<const TwoElements<E>*>(row + 8 * n);
          f(n, 2 * r, two.first);
          f(n, 2 * r + 1, two.second);
        }
      }
      return;
    }
    for_each_pair<kBlocks>([&](int n, int e) {
      if (seen & bit_of_pair(n, e)) f(n, e, data[own[e / 2] * of_own + (8 * n + e % 2) * of_others]);
    });
  }
  // Whether all of the tile's keys are there, and two of them lie side by side.
  template <class E>
  __device__ bool in_twos(const Broadcast& of, int64_t begin) const {
    const auto first = reinterpret_cast<uintptr_t>(static_cast<const E*>(of.data) + begin);
    return whole && of.key == 1 && ((first | of.query * sizeof(E)) & (2 * sizeof(E) - 1)) == 0;
  }

  template <class E, bool kKeys, int kBlocks>
  __device__ unsigned add_bias(float (&x)[kBlocks][4], const int (&own)[2], int other, unsigned seen) const {
    unsigned visible = seen;
    for_each_element<E, kKeys, kBlocks>(p.bias, bias_at, own, other, seen, [&](int n, int e, E element) {
      const float bias = to_float(element);
      if (bias == -INFINITY) visible &= ~bit_of_pair(n, e);
      x[n][e] += bias;
    });
    return visible;
  }

  template <bool kKeys, int kBlocks>
  __device__ unsigned shown(const int (&own)[2], int other, unsigned seen) const {
    unsigned of_mask = seen, hidden = 0;
    if (mask_from > 0) {
      for_each_pair<kBlocks>([&](int n, int e) {
        if ((kKeys ? own[e / 2] : other + 8 * n + e % 2) < mask_from) of_mask &= ~bit_of_pair(n, e);
      });
    }
    for_each_element<uint8_t, kKeys, kBlocks>(p.mask, mask_at, own, other, of_mask, [&](int n, int e, uint8_t shows) {
      if (shows == 0) hidden |= bit_of_pair(n, e);
    });
    return seen & ~hidden;
  }

  const Problem& p;
  const ScoreProgram program;
  int64_t q, k;  // the first of each
  int64_t mask_at, bias_at;
  int mask_from;   // the first key of the tile that the mask tells of
  int last_query;  // of the tile
  bool whole;      // all its keys are there, and the mask tells of them
  float slope = 0, position = 0;
};

// Which weights of a tile are kept, in shared memory: 64 queries and 64 keys, a bit each. A warp knows those of 16.
struct Kept {
  uint16_t bits[kTileRows / 16][kTileRows + 16];  // [sixteen keys][query]; 16 more, for other banks

  // Which of a lane's pairs of its own queries, or with kKeys keys, and others (see for_each_pair). The warp has 16 rows.
  template <bool kKeys, int kBlocks>
  __device__ unsigned pairs(const int (&own)[2], int other) const {
    unsigned kept = 0;
    if constexpr (kKeys) {
      for_each_pair<kBlocks>(
          [&](int n, int e) { kept |= holds(other + 8 * n + e % 2, own[e / 2]) ? bit_of_pair(n, e) : 0; });
    } else {
#pragma unroll
      for (int k = 0; k < kBlocks / 2; ++k) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const unsigned keys = sixteen(own[r], other / 16 + k) >> other % 8;
          kept |= (keys & 3 | (keys >> 8 & 3) << 4) << (8 * k + 2 * r);
        }
      }
    }
    return kept;
  }

  // The keys 16 n .. 16 n + 15 of query i
  __device__ unsigned sixteen(int i, int n) const { return bits[n][i]; }
  __device__ bool holds(int i, int j) const { return bits[j / 16][i] >> j % 16 & 1; }

  // The own 16 of a warp are queries, or keys.
  __device__ void fill(const Dropout& dropout, int64_t b, int64_t h, int64_t first_query, int64_t first_key,
                       bool own_keys, int warp = static_cast<int>(threadIdx.x) / 32) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const auto head = dropout.first_head + static_cast<uint32_t>(b) * dropout.heads + static_cast<uint32_t>(h);
    __syncwarp();  // nobody reads the last tile's
#pragma unroll 1
    for (int n = lane; n < kTileRows; n += 32) {
      const int i = own_keys ? n : warp * 16 + n % 16, sixteen = own_keys ? warp : n / 16;
      const auto query = dropout.first_query + static_cast<uint32_t>(first_query + i);
      const auto group = dropout.first_key_group + static_cast<uint32_t>(first_key / 8 + sixteen * 2);
      bits[sixteen][i] =
          static_cast<uint16_t>(eight(dropout, head, query, group) | eight(dropout, head, query, group + 1) << 8);
    }
    __syncwarp();
  }

 private:
  __device__ static unsigned eight(const Dropout& dropout, uint32_t head, uint32_t query, uint32_t group) {
    const auto words = philox4x32({head, query, group, dropout.offset},
                                  {static_cast<uint32_t>(dropout.seed), static_cast<uint32_t>(dropout.seed >> 32)});
    unsigned kept = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      kept |= ((words[w] & 0xffff) >= dropout.threshold ? 1u : 0) << 2 * w;
      kept |= (words[w] >> 16 >= dropout.threshold ? 2u : 0) << 2 * w;
    }
    return kept;
  }
};

}  // namespace polyhead::cuda
