// Online softmax of a tile: raw scores in registers become weights in memory.
//
// m is a stale maximum: an integer in base 2, raised only when a score exceeds it by more than 2^kHeadroom, and then
// all that was summed is scaled by a power of two, which is exact. So the pass over O of the textbook algorithm
// practically never runs, and no result depends on when it does.
#pragma once

#include "cpu/elementary.h"
#include "cpu/mask.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr float kHeadroom = 20;

// Where a row starts: below every score, so that the first visible one raises it.
constexpr float kNoMaximum = -3.402823466e38f;

struct TileState {
  float* out;  // O^T [head_dim_v][kTile], not yet divided by l
  alignas(64) float m[kTile];
  alignas(64) float l[kTile];
};

// From Q K^T to the logits of one head.
struct ScoreRule {
  float scale, softcap, slope;
  bool natural;  // softcap, ALiBi or an additive tile: scores are scaled before they are used
  float factor;  // then what brings a score to base 2
};

inline ScoreRule score_rule(const Problem& problem, int64_t b, int64_t h) {
  ScoreRule rule{problem.scale, problem.softcap, 0, false, 0};
  if (problem.slopes != nullptr) rule.slope = problem.slopes[b * problem.slopes_stride_b + h * problem.slopes_stride_h];
  rule.natural = problem.softcap > 0 || problem.slopes != nullptr || problem.mask.data != nullptr ||
                 problem.bias.data != nullptr;
  rule.factor = rule.natural ? kLog2E : problem.scale * kLog2E;
  return rule;
}

// How one tile sees one block of keys. Null: every query sees every key / nothing is added / nothing is dropped.
struct BlockView {
  const BlockRanges* ranges = nullptr;
  const float* additive = nullptr;
  bool additive_shared = false;                   // one row for all queries: additive[key]
  const uint16_t (*kept)[kVecs] = nullptr;        // [key][vector]
  const float* diagonal = nullptr;                // ALiBi: position of each query, relative to the block's first key
};

// Scores as the contract says: scale, softcap, ALiBi, bias; -inf where hidden. s[r][v]: key + r, lanes lane + v * kLanes.
template <int kRows, int kVecs_>
inline void apply_rule(F (&s)[kRows][kVecs_], const ScoreRule& rule, const BlockView& view, int key, int lane) {
#pragma GCC unroll 8
  for (int v = 0; v < kVecs_; ++v) {
    const int at = lane + v * kLanes;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      F x = s[r][v];
      if (rule.natural) {
        x = x * broadcast(rule.scale);
        if (rule.softcap > 0) x = broadcast(rule.softcap) * tanh(x / broadcast(rule.softcap));
        F add = broadcast(0.0f);
        if (view.additive != nullptr) {
          add = view.additive_shared ? broadcast(view.additive[key + r]) : load(view.additive + (key + r) * kTile + at);
        }
        if (view.diagonal != nullptr) {
          const F distance = absolute(load(view.diagonal + at) - broadcast(static_cast<float>(key + r)));
          x = x - broadcast(rule.slope) * distance;
        }
        x = select(equal(add, broadcast(-kInfinity)), add, x + add);
      }
      if (view.ranges != nullptr) {
        const I index = broadcast_int(key + r);
        const M seen = both(less_int(index, load_int(view.ranges->end + at)),
                            negate(less_int(index, load_int(view.ranges->begin + at))));
        x = select(seen, x, broadcast(-kInfinity));
      }
      s[r][v] = x;
    }
  }
}

// Raises m where the largest new score needs it, and scales what was summed under the old one.
__attribute__((noinline)) void raise_maximum(TileState& state, const F* largest, int num_vecs, int lane, int64_t dim) {
  for (int v = 0; v < num_vecs; ++v) {
    const int at = lane + v * kLanes;
    const F old = load(state.m + at);
    const F raised = select(less(old + broadcast(kHeadroom), largest[v]), round_to_even(largest[v]), old);
    const F alpha = exp2<5>(old - raised);
    store(state.m + at, raised);
    store(state.l + at, load(state.l + at) * alpha);
    for (int64_t d = 0; d < dim; ++d) store(state.out + d * kTile + at, load(state.out + d * kTile + at) * alpha);
  }
}

// Scores of kRows keys -> weights exp2(s - m) after dropout, stored as words of P^T; l grows by the undropped ones.
template <class Mac, int kRows, int kVecs_>
inline void softmax_step(F (&s)[kRows][kVecs_], float* p, TileState& state, const ScoreRule& rule,
                         const BlockView& view, int key, int lane, int64_t dim) {
  if (rule.natural || view.ranges != nullptr) apply_rule(s, rule, view, key, lane);
  const F factor = broadcast(rule.factor);
  F m[kVecs_];
#pragma GCC unroll 8
  for (int v = 0; v < kVecs_; ++v) m[v] = load(state.m + lane + v * kLanes);
  F top = broadcast(kNoMaximum);
#pragma GCC unroll 8
  for (int v = 0; v < kVecs_; ++v) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) top = maximum(fma(s[r][v], factor, broadcast(0.0f) - m[v]), top);
  }
  if (any(less(broadcast(kHeadroom), top))) {
    F largest[kVecs_];
    for (int v = 0; v < kVecs_; ++v) {
      largest[v] = broadcast(kNoMaximum);
      for (int r = 0; r < kRows; ++r) largest[v] = maximum(s[r][v] * factor, largest[v]);
    }
    raise_maximum(state, largest, kVecs_, lane, dim);
    for (int v = 0; v < kVecs_; ++v) m[v] = load(state.m + lane + v * kLanes);
  }
  constexpr int kDegree = Mac::kElements == 1 ? 5 : 3;
#pragma GCC unroll 8
  for (int v = 0; v < kVecs_; ++v) {
    F sum = broadcast(0.0f);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      s[r][v] = exp2<kDegree>(fma(s[r][v], factor, broadcast(0.0f) - m[v]));
      sum = sum + s[r][v];
    }
    store(state.l + lane + v * kLanes, load(state.l + lane + v * kLanes) + sum);
    if (view.kept != nullptr) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const M kept = mask_from_bits(view.kept[key + r][lane / kLanes + v]);
        s[r][v] = select(kept, s[r][v], broadcast(0.0f));
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r += Mac::kElements) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs_; ++v) {
      F word = s[r][v];
#ifdef POLYHEAD_HAS_BF16_DOT
      if constexpr (Mac::kElements == 2) word = pair_bf16(s[r][v], s[r + 1][v]);
#endif
      store(p + (key + r) / Mac::kElements * kTile + lane + v * kLanes, word);
    }
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
