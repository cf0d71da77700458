// What options make of scores, and which keys they hide, one pair of a query and a key at a time:
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

// A score on its way.
struct PairScore {
  float S = 0;
  float before = 0;      // S, before the program
  float derivative = 0;  // of `before` by X
};

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
    if (p.slopes.data == nullptr) return;
    slope = static_cast<const float*>(p.slopes.data)[b * p.slopes.batch + h * p.slopes.head];
    // Offsets may be any int64. Beside a far one the place of the tile is below its rounding.
    const bool far = offset > kFar || offset < -kFar;
    position = static_cast<float>(far ? offset : first_query + offset - first_key);
  }

  // Of X, of a pair in the range of its query. Returns whether the pair is visible.
  __device__ bool of(float x, PairScore& score, int i, int j) const {
    score.derivative = 1;
    if (p.softcap > 0) {
      const float t = tanhf(x / p.softcap);
      x = p.softcap * t;
      score.derivative = 1 - t * t;
    }
    if (p.slopes.data != nullptr) x -= slope * distance(i, j);
    if (p.bias.data != nullptr) {
      const float bias = bias_of(i, j);
      if (bias == -INFINITY) return false;
      x += bias;
    }
    score.before = score.S = x;
    if (!shown(i, j)) return false;
    if constexpr (ScoreProgram::kHasScore) {
      score.S = program.score(x, q + i, k + j);
      return score.S != -INFINITY;
    }
    return true;
  }

  // The gradient of the score before the program.
  __device__ float gradient(const PairScore& score, float of_score, int i, int j) const {
    if constexpr (ScoreProgram::kHasScore) return program.gradient(score.before, of_score, q + i, k + j);
    return of_score;
  }
  // add(...) for each element of captures that the pair read: program.cuh.
  template <class Add>
  __device__ void gradients_of_captures(const PairScore& score, float of_score, int i, int j, const Add& add) const {
    program.gradients_of_captures(score.before, of_score, q + i, k + j, add);
  }

  // |i + offset - j|
  __device__ float distance(int i, int j) const { return fabsf(position + static_cast<float>(i - j)); }

 private:
  __device__ static int64_t at(const Broadcast& x, int64_t b, int64_t h, int64_t i, int64_t j) {
    return b * x.batch + h * x.head + i * x.query + j * x.key;
  }
  __device__ float bias_of(int i, int j) const {
    return load_number(p.bias.data, p.bias.number, bias_at + i * p.bias.query + j * p.bias.key);
  }
  __device__ bool shown(int i, int j) const {
    const bool by_mask = p.mask.data == nullptr || j < mask_from ||
                         static_cast<const uint8_t*>(p.mask.data)[mask_at + i * p.mask.query + j * p.mask.key] != 0;
    if constexpr (ScoreProgram::kHasMask) return by_mask && program.shows(q + i, k + j);
    return by_mask;
  }

  const Problem& p;
  const ScoreProgram program;
  int64_t q, k;  // the first of each
  int64_t mask_at, bias_at;
  int mask_from;  // the first key of the tile that the mask tells of
  float slope = 0, position = 0;
};

// Which weights of a tile are kept, in shared memory: 64 queries and 64 keys, a bit each. A warp knows those of 16.
struct Kept {
  uint16_t bits[kTileRows / 16][kTileRows + 16];  // [sixteen keys][query]; 16 more, for other banks

  // The keys 16 n .. 16 n + 15 of query i
  __device__ unsigned sixteen(int i, int n) const { return bits[n][i]; }
  __device__ bool holds(int i, int j) const { return bits[j / 16][i] >> j % 16 & 1; }

  // The warp's own 16 are queries, or keys.
  __device__ void fill(const Dropout& dropout, int64_t b, int64_t h, int64_t first_query, int64_t first_key,
                       bool own_keys) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
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
