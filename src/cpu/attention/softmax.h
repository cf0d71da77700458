// Online softmax of a tile: raw scores in registers become weights in memory.
//
// m is a stale maximum: the largest of the first scores that a row saw, raised only when a score exceeds it by more than
// a factor kHeadroom in weight. So the pass over O of the textbook algorithm practically never runs. Weights stay below
// kHeadroom, and the first maximum's own weight is exactly 1.
#pragma once

#include "cpu/attention/functions.h"
#include "cpu/attention/score/policy.h"
#ifdef POLYHEAD_HAS_TMM
#include "cpu/isa/planes.h"
#include "cpu/isa/tmm_products.h"
#endif

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

#ifdef POLYHEAD_HAS_TMM
static_assert(kWeightsPlane == kBlock / 2 * kTile);
#endif
constexpr float kHeadroom = 1024;  // the largest sum of 4 weights, or of 32, that m need not be raised for
constexpr float kLeastLowered = 7.88860905e-31f;  // 2^-100: see lowered

// Where a row starts: below every score, so that the first visible one raises it.
constexpr float kNoMaximum = -3.402823466e38f;

struct TileState {
  float* out;  // O^T [head_dim_v][kTile], not yet divided by the sum of its weights
  alignas(64) float m[kTile];
  alignas(64) float m_of_out[kTile];   // the m that O^T stands under, but for HeldOut: behind, once m was raised
  alignas(64) float l[kTile];          // sum of the weights: for L
  alignas(64) float l_rounded[kTile];  // the same of the weights as they multiply V, where those are bfloat16: for O
};

// A weight under a raised maximum. 0 where its products with V might be subnormal, for O is as small then until larger
// weights follow, and a sum that is subnormal takes some CPUs as long as a hundred; NaN stays NaN.
inline F lowered(F weight, F alpha) {
  const F x = weight * alpha;
  return select(less(x, broadcast(kLeastLowered)), broadcast(0.0f), x);
}

// Words of P^T times `alpha`.
template <class Mac>
inline F rescale(F word, F alpha) {
#ifdef POLYHEAD_HAS_BF16_DOT
  if constexpr (Mac::kRounded) return pair_bf16(lowered(even_bf16(word), alpha), lowered(odd_bf16(word), alpha));
#endif
  return lowered(word, alpha);
}

// Sets m of one vector of queries to `raised`, and scales what was summed under the old one: l, and the weights of this
// block's keys [0, key). O follows once they are complete.
template <class Mac>
__attribute__((noinline)) void raise_maximum(TileState& state, float* p, F raised, float factor, int key, int lane) {
  const F old = load(state.m + lane);
  const F alpha = exp2(old - raised, broadcast(factor));
  store(state.m + lane, raised);
  store(state.l + lane, load(state.l + lane) * alpha);
  store(state.l_rounded + lane, load(state.l_rounded + lane) * alpha);
  for (int word = 0; word < key / Mac::kElements; ++word) {
#ifdef POLYHEAD_HAS_TMM
    if constexpr (Mac::kPlanes > 1) {
      float* const at = p + word * kTile + lane;
      const PlaneWords planes = load_planes(at, kWeightsPlane);
      store_planes(at, kWeightsPlane, split(lowered(even_number(planes), alpha), lowered(odd_number(planes), alpha)));
      continue;
    }
#endif
    store(p + word * kTile + lane, rescale<Mac>(load(p + word * kTile + lane), alpha));
  }
}

// Scales O^T of the vectors [v_begin, v_end) to their m, before weights under it are added; a fresh one holds nothing.
inline void follow_maximum(TileState& state, float factor, int v_begin, int v_end, int64_t dim, bool fresh) {
  for (int lane = v_begin * kLanes; lane < v_end * kLanes; lane += kLanes) {
    const F m = load(state.m + lane), old = load(state.m_of_out + lane);
    if (__builtin_expect(!any(less(old, m)), 1)) continue;
    store(state.m_of_out + lane, m);
    if (fresh) continue;
    const F alpha = exp2(old - m, broadcast(factor));
    for (int64_t d = 0; d < dim; ++d) store(state.out + d * kTile + lane, load(state.out + d * kTile + lane) * alpha);
  }
}

// exp(s - m) of kRows keys for one vector of queries, and its sum. Where the sum says that m is too low, m is raised. Mac says
// which exponential: a second pass over the same scores, whose P is in other words, must not find a larger sum than the first.
template <class Mac, class PMac, int kRows>
__attribute__((always_inline)) inline F weigh(F (&s)[kRows], float* p, TileState& state, float factor, int key,
                                              int lane) {
  for (;;) {
    const F m = load(state.m + lane);
    F weight[kRows], sum = broadcast(0.0f);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F x = s[r] - m;
      weight[r] = Mac::kRounded ? exp2_of_pair(x, broadcast(factor)) : exp2(x, broadcast(factor));
      sum = sum + weight[r];
    }
    const M too_low = outside(sum, kHeadroom);
    F raised = m;
    if (__builtin_expect(any(too_low), 0)) {
      for (int r = 0; r < kRows; ++r) raised = maximum(s[r], raised);
      raised = select(too_low, raised, m);  // no other query's m: its result would depend on this one
    }
    if (__builtin_expect(!any(too_low) || !any(less(m, raised)), 1)) {  // where the sum is NaN nothing can be raised
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) s[r] = weight[r];
      return sum;
    }
    raise_maximum<PMac>(state, p, raised, factor, key, lane);
  }
}

// Weights of kRows keys of one vector of queries, after dropout where kDrops, stored as words of P^T. Returned: the sum of
// the undropped ones as they are rounded there, where those are bfloat16.
template <class Mac, bool kDrops, int kRows>
inline __attribute__((always_inline)) F store_weights_of(F (&s)[kRows], float* words, const uint16_t (*kept)[kVecs],
                                                         int key, int at) {
  F sum_rounded = broadcast(0.0f);
  [[maybe_unused]] const auto drop = [&](int r) __attribute__((always_inline)) {
    s[r] = select(mask_from_bits(kept[key + r][at / kLanes]), s[r], broadcast(0.0f));
  };
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r += Mac::kElements) {
#ifdef POLYHEAD_HAS_TMM
    if constexpr (Mac::kPlanes > 1) {
      const auto weight = [&](int i) __attribute__((always_inline)) {
        if constexpr (kDrops) drop(i);
        return s[i];
      };
      store_planes(words + r / 2 * kTile, kWeightsPlane,
                   split(weight(r), r + 1 < kRows ? weight(r + 1) : broadcast(0.0f)));
      continue;
    }
#endif
    F word = s[r];
#ifdef POLYHEAD_HAS_BF16_DOT
    if constexpr (Mac::kRounded) {
      word = pair_bf16(s[r], r + 1 < kRows ? s[r + 1] : broadcast(0.0f));
      s[r] = even_bf16(word);
      if (r + 1 < kRows) s[r + 1] = odd_bf16(word);
      sum_rounded = sum_rounded + (s[r] + odd_bf16(word));
    }
#endif
    if constexpr (kDrops) {
      drop(r);
      if (Mac::kRounded && r + 1 < kRows) drop(r + 1);
      word = s[r];
#ifdef POLYHEAD_HAS_BF16_DOT
      if constexpr (Mac::kRounded) word = join_bf16(s[r], r + 1 < kRows ? s[r + 1] : broadcast(0.0f));
#endif
    }
    store(words + r / Mac::kElements * kTile, word);
  }
  return sum_rounded;
}

template <class Mac, int kRows>
inline F store_weights(F (&s)[kRows], float* words, const uint16_t (*kept)[kVecs], int key, int at) {
  if (kept == nullptr) return store_weights_of<Mac, false>(s, words, kept, key, at);
  return store_weights_of<Mac, true>(s, words, kept, key, at);
}

// Scores of kRows keys, products of words of Mac -> weights exp(s - m) after dropout, stored as words of P^T, which are PMac's;
// l grows by the undropped ones. beside(): other work between (take_unit).
template <class Mac, class PMac, int kRows, int kVecs_, class... Beside>
__attribute__((always_inline)) inline void softmax_step(F (&scores)[kRows][kVecs_], float* p, TileState& state,
                                                        float factor, const uint16_t (*kept)[kVecs], int key, int lane,
                                                        const Beside&... beside) {
#pragma GCC unroll 8
  for (int v = 0; v < kVecs_; ++v) {
    const int at = lane + v * kLanes;
    F s[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) s[r] = scores[r][v];
    const F sum = weigh<Mac, PMac>(s, p, state, factor, key, at);
    store(state.l + at, load(state.l + at) + sum);
    (beside(), ...);
    const F sum_rounded = store_weights<PMac>(s, p + key / PMac::kElements * kTile + at, kept, key, at);
    if constexpr (PMac::kRounded) store(state.l_rounded + at, load(state.l_rounded + at) + sum_rounded);
  }
}

// Without a softmax: scores of kRows keys are the weights, 0 where hidden.
template <class Mac, int kRows, int kVecs_>
inline void score_step(F (&scores)[kRows][kVecs_], float* p, const Score& score, const BlockView& view, bool masked,
                       int key, int lane) {
#pragma GCC unroll 8
  for (int v = 0; v < kVecs_; ++v) {
    const int at = lane + v * kLanes;
    F s[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      s[r] = scores[r][v];
      if (view.kept != nullptr) {  // a product, not a selection: NaN stays NaN
        const M keep = mask_from_bits(view.kept[key + r][at / kLanes]);
        s[r] = s[r] * select(keep, broadcast(1.0f), broadcast(0.0f));
      }
      if (masked) s[r] = select(score.sees(view, key + r, at), s[r], broadcast(0.0f));
    }
    store_weights<Mac>(s, p + key / Mac::kElements * kTile + at, nullptr, key, at);
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
