// Forward of bfloat16 pairs in registers of 16 x 16 words, of up to 128 dims: O^T of 16 queries stays in registers while units
// of 32 keys pass by, half of it where it has more than 64 dims (forward_halves.h). Beside softmax of one unit, which the
// vectors compute, the registers make the scores of the next, then add the weights of the one before, or of the queries before,
// times V; no unit waits for its own products. docs/cores.md tells what that gains. All but what describes a unit is called
// while SubnormalsAsZero is there.
#pragma once

#include "cpu/attention/forward_halves.h"
#include "cpu/isa/rows_ahead.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int64_t kHeldDims = 64;  // O in registers 0 to 3, scores in 4 and 5, two factors; of more dims half of O

class HeldOut : public Asking {
 public:
  // apply(), where products are the scores.
  struct Products {
    static constexpr bool kDrops = false;  // whether dropout may take weights
    template <int kRows>
    void operator()(F (&)[kRows][1], int, int) const {}
  };

  // p: OutInHalves::kFloats. factor: what scores are multiplied by to be powers of 2.
  HeldOut(RowsAhead* asked, float* p, int64_t dims, float factor)
      : Asking{asked}, halves_(p), pairs_(static_cast<int>(whole(dims, kDimStep) / kDimStep)), p_(p), factor_(factor) {}
  HeldOut(const HeldOut&) = delete;

  // Where the unit is described that add() then takes: in place, for a copy would be read before it is written.
  HeldUnit& next() { return *next_; }

  // Scores of the next unit are made, beside softmax of the one before it, whose products apply(s, key, lane) makes scores.
  template <class Apply>
  void add(const Apply& apply) {
    with_pairs([&]<int kPairs>() {
      if (waits_) return advance<kPairs>(apply, true);
      make_scores<kPairs>(*next_);
      take_next();
    });
  }

  // Softmax of the last unit: apply() and what it reads may go then.
  template <class Apply>
  void rest(const Apply& apply) {
    if (waits_) with_pairs([&]<int kPairs>() { advance<kPairs>(apply, false); });
  }

  // All products with V, and O in memory. A unit that waits for its softmax is one whose products are scores.
  __attribute__((noinline)) void finish() {
    rest(Products());
    with_pairs([&]<int kPairs>() {
      if constexpr (kPairs > 2) {
        halves_.finish<kPairs>();
      } else {
        finish_products<kPairs>();
      }
    });
  }

 private:
  static constexpr int kSteps = 8, kStepKeys = kUnitKeys / kSteps;

  template <class Work>
  __attribute__((always_inline)) void with_pairs(const Work& work) {
    switch (pairs_) {
      case 1: return work.template operator()<1>();
      case 2: return work.template operator()<2>();
      case 3: return work.template operator()<3>();
      default: return work.template operator()<4>();
    }
  }

  // Product i of a unit's scores: 16 keys, 16 words of each. K, as V, past L1, which keeps scores, weights and Q.
  template <int i>
  __attribute__((always_inline)) static void load_factors_of_scores(const HeldUnit& unit) {
    constexpr int kWord = i / 2 * kTmmRows, kHalf = i % 2;
    if constexpr (kHalf == 0) tmm_load<7>(unit.query + kWord * kTile, kTile);
    tmm_load<6, true>(unit.keys + kHalf * kTmmRows * unit.key_stride + kWord, unit.key_stride);
  }
  template <int i>
  __attribute__((always_inline)) static void multiply_scores() {
    if constexpr (i < 2) tmm_zero<4 + i>();
    tmm_dot_bf16<4 + i % 2, 6, 7>();
  }
  template <int kHalf>
  __attribute__((always_inline)) void store_scores(int turn) {
    tmm_store<4 + kHalf>(scores_[turn] + kHalf * kTmmRows * kHeldLanes, kHeldLanes);
  }

  // Product i of a unit's weights and V: 16 dims.
  template <int i>
  __attribute__((always_inline)) static void load_factors_of_out(const HeldUnit& unit) {
    if constexpr (i == 0) tmm_load<7>(unit.weights, kTile);
    tmm_load<6, true>(unit.values + i / 2 * unit.value_stride + i % 2 * kTmmRows * kTmmRows, kTmmRows);
  }

  // O that is in registers gives way to that of the unit before.
  template <int i>
  __attribute__((always_inline)) void change_out() {
    if (held_ != nullptr) tmm_store<i>(held_ + i * kTmmRows * kTile, kTile);
    if (before_->fresh) {
      tmm_zero<i>();
    } else {
      tmm_load<i>(before_->out() + i * kTmmRows * kTile, kTile);
    }
  }

  template <int kPairs>
  void make_scores(const HeldUnit& unit) {
    unrolled<2 * kPairs>([&]<int i>() {
      load_factors_of_scores<i>(unit);
      multiply_scores<i>();
    });
    store_scores<0>(turn_);
    store_scores<1>(turn_);
  }

  template <int kPairs>
  void finish_products() {
    if (multiplies_) {
      if (raised_) follow<kPairs>();
      if (held_ != before_->out()) unrolled<2 * kPairs>([&]<int i>() { change_out<i>(); });
      held_ = before_->out();
      unrolled<2 * kPairs>([&]<int i>() {
        load_factors_of_out<i>(*before_);
        tmm_dot_bf16<i, 6, 7>();
      });
    }
    if (held_ != nullptr) unrolled<2 * kPairs>([&]<int i>() { tmm_store<i>(held_ + i * kTmmRows * kTile, kTile); });
    held_ = nullptr;
    multiplies_ = false;
  }

  // m was raised for the weights of the unit before: O, which stands under the old one, is scaled.
  template <int kPairs>
  __attribute__((noinline)) void follow() {
    raised_ = false;
    float* const out = before_->out();
    const bool in_registers = held_ == out;
    if (!in_registers && before_->fresh) return;
    if (in_registers) unrolled<2 * kPairs>([&]<int i>() { tmm_store<i>(out + i * kTmmRows * kTile, kTile); });
    for (int d = 0; d < 2 * kPairs * kTmmRows; ++d) {
      for (int at = 0; at < kHeldLanes; at += kLanes) {
        store(out + d * kTile + at, load(out + d * kTile + at) * load(alpha_ + at));
      }
    }
    if (in_registers) unrolled<2 * kPairs>([&]<int i>() { tmm_load<i>(out + i * kTmmRows * kTile, kTile); });
  }

  // Raises m of those of the unit's queries [at, at + kLanes) that are too low to their largest score, where that is larger;
  // what was summed before the unit follows. False: there are none.
  template <int kPairs, class Apply>
  __attribute__((noinline)) bool raise(const Apply& apply, int at, M too_low) {
    TileState& state = *unit_->state;
    const int lane = unit_->lane + at;
    const F m = load(state.m + lane);
    F raised = m;
    const Softmax<Apply> softmax = softmax_of_unit(apply);
    for (int key = 0; key < kUnitKeys; key += kStepKeys) {
      F s[kStepKeys][1];
      softmax.load_scores(s, key, at);
      for (int r = 0; r < kStepKeys; ++r) raised = maximum(s[r][0], raised);
    }
    raised = select(too_low, raised, m);      // no other query's m: its result would depend on this one
    if (!any(less(m, raised))) return false;  // where the sum is NaN nothing can be raised
    const F alpha = exp2(m - raised, broadcast(factor_));
    store(state.m + lane, raised);
    store(state.l + lane, load(state.l + lane) * alpha);
    store(state.l_rounded + lane, load(state.l_rounded + lane) * alpha);
    if constexpr (kPairs > 2) {
      halves_.scale<kPairs>(at, alpha);
    } else {
      for (int i = 0; i < kHeldLanes && !raised_; i += kLanes) store(alpha_ + i, broadcast(1.0f));
      store(alpha_ + at, load(alpha_ + at) * alpha);
      raised_ = true;
    }
    return true;
  }

  // What softmax of a unit reads: copied into registers, for what the object holds is read again after each store.
  template <class Apply>
  struct Softmax {
    const float* scores;
    float* weights;
    const uint16_t (*kept)[kVecs];
    int key, lane;
    F factor;
    Apply apply;
    NearestBf16 nearest;

    template <int kRows>
    __attribute__((always_inline)) void load_scores(F (&s)[kRows][1], int first, int at) const {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) s[r][0] = load(scores + (first + r) * kHeldLanes + at);
      apply(s, key + first, lane + at);
    }
    // Weights [kBegin, kEnd) of kStepKeys keys, from `first` of the unit on, of one vector of queries. Returned: `sum`, of those
    // before, with them.
    template <int kBegin, int kEnd>
    __attribute__((always_inline)) F weigh(F (&weight)[kStepKeys], int first, int at, F m,
                                           F sum = broadcast(0.0f)) const {
      F s[kEnd - kBegin][1];
      load_scores(s, first + kBegin, at);
#pragma GCC unroll 8
      for (int r = kBegin; r < kEnd; ++r) weight[r] = exp2_flushed((s[r - kBegin][0] - m) * factor);
#pragma GCC unroll 8
      for (int r = kBegin; r < kEnd; ++r) sum = r == 0 ? weight[r] : sum + weight[r];
      return sum;
    }
    // The same as words of P^T. Returned: the sum of the undropped ones as they are rounded there, which may lack NaN (NearestBf16).
    __attribute__((always_inline)) F keep(F (&weight)[kStepKeys], int first, int at) const {
      float* const words = weights + first / 2 * kTile + at;
      if (Apply::kDrops && kept != nullptr) {
        return store_weights_of<BFloat16Pair, true>(weight, words, kept, key + first, lane + at);
      }
      F rounded;
      for (int r = 0; r < kStepKeys; r += 2) {
        const F even = nearest.round(weight[r]), odd = nearest.round(weight[r + 1]);
        store(words + r / 2 * kTile, nearest.join(even, odd));
        const F both = nearest.value(even) + nearest.value(odd);
        rounded = r == 0 ? both : rounded + both;
      }
      return rounded;
    }
  };

  template <class Apply>
  Softmax<Apply> softmax_of_unit(const Apply& apply) const {
    const HeldUnit& unit = *unit_;
    return {scores_[turn_], unit.weights, unit.kept, unit.key, unit.lane, broadcast(factor_), apply, {}};
  }

  // All weights of a vector of queries once more, under a raised m.
  template <class Apply>
  __attribute__((noinline)) void weigh_again(const Apply& apply, int at, float* sums) const {
    const Softmax<Apply> softmax = softmax_of_unit(apply);
    const F m = load(unit_->state->m + unit_->lane + at);
    F sum = broadcast(0.0f), rounded = broadcast(0.0f);
    for (int key = 0; key < kUnitKeys; key += kStepKeys) {
      F weight[kStepKeys];
      sum = sum + softmax.template weigh<0, kStepKeys>(weight, key, at, m);
      rounded = rounded + softmax.keep(weight, key, at);
    }
    store(sums, sum);
    store(sums + kLanes, rounded);
  }

  // Of every other step, for two.
  __attribute__((noinline)) static void ask_for_steps(RowsAhead* asked) { asked->ask(2 * kStepKeys * kHeldLanes); }

  // What the registers do before the vectors make weights of a step, within, and behind: scores of the next unit, in the first
  // steps, then products with V.
  struct Beside {
    const HeldUnit* scores;    // null: there is no next unit
    const HeldUnit* products;  // with V of up to 64 dims; null: there are none, or OutInHalves has them
    bool changes;              // O in registers gives way to that of other queries before
  };
  template <int kPairs, int step>
  __attribute__((always_inline)) void multiply_before(const Beside& beside) {
    constexpr int kOfUnit = 2 * kPairs;  // products of scores, and of O
    if constexpr (kPairs > 2) {
      load_of_wide<kPairs, step, 0>(beside);
    } else {
      constexpr int kEvery = kSteps / (2 * kOfUnit), kProduct = step / kEvery % kOfUnit;
      if constexpr (step < kOfUnit) {
        if (beside.changes) change_out<step>();
      }
      if constexpr (step % kEvery != 0) return;
      if constexpr (step < kSteps / 2) {
        if (beside.scores != nullptr) load_factors_of_scores<kProduct>(*beside.scores);
      } else {
        if (beside.products != nullptr) load_factors_of_out<kProduct>(*beside.products);
      }
    }
  }
  template <int kPairs, int step>
  __attribute__((always_inline)) void multiply_within(const Beside& beside) {
    if constexpr (kPairs > 2) {
      multiply_of_wide<kPairs, step, 0>(beside);
      load_of_wide<kPairs, step, 1>(beside);
    }
  }
  template <int kPairs, int step>
  __attribute__((always_inline)) void multiply_behind(const Beside& beside) {
    if constexpr (kPairs > 2) {
      multiply_of_wide<kPairs, step, 1>(beside);
    } else {
      constexpr int kOfUnit = 2 * kPairs, kEvery = kSteps / (2 * kOfUnit), kProduct = step / kEvery % kOfUnit;
      if constexpr (step % kEvery == 0 && step < kSteps / 2) {
        if (beside.scores != nullptr) multiply_scores<kProduct>();
      } else if constexpr (step % kEvery == 0) {
        if (beside.products != nullptr) tmm_dot_bf16<kProduct, 6, 7>();
      }
    }
    if constexpr (step == kSteps / 2 || step == kSteps / 2 + 1) {
      if (beside.scores != nullptr) store_scores<step - kSteps / 2>(turn_ ^ 1);
    }
  }
  // The factors that step 0 has loaded, where O was scaled since.
  template <int kPairs>
  __attribute__((always_inline)) void load_again(const Beside& beside) {
    if constexpr (kPairs > 2) {
      load_of_wide<kPairs, 0, 0>(beside);
      load_of_wide<kPairs, 0, 1>(beside);
    }
  }
  // Of more than 64 dims two products a step: of scores, then twice four of OutInHalves.
  template <int kPairs, int step, int i>
  __attribute__((always_inline)) void load_of_wide(const Beside& beside) {
    if constexpr (step >= kSteps / 2) {
      if (halves_.left()) halves_.load_factors<kPairs, step % 2 * 2 + i>();
    } else if constexpr (2 * step + i < 2 * kPairs) {
      if (beside.scores != nullptr) load_factors_of_scores<2 * step + i>(*beside.scores);
    }
  }
  template <int kPairs, int step, int i>
  __attribute__((always_inline)) void multiply_of_wide(const Beside& beside) {
    if constexpr (step >= kSteps / 2) {
      if (halves_.left()) halves_.multiply<kPairs, step % 2 * 2 + i>();
    } else if constexpr (2 * step + i < 2 * kPairs) {
      if (beside.scores != nullptr) multiply_scores<2 * step + i>();
    }
  }

  // Softmax of the unit, and beside it what multiply_before() tells.
  template <int kPairs, class Apply>
  __attribute__((noinline)) void advance(const Apply& apply, bool scores) {
    if constexpr (kPairs > 2) {
      halves_.open<kPairs>(*unit_);
    } else {
      if (__builtin_expect(raised_, 0)) follow<kPairs>();
    }
    const bool products = kPairs <= 2 && multiplies_;
    const Beside beside{scores ? next_ : nullptr, products ? before_ : nullptr, products && held_ != before_->out()};
    const Softmax<Apply> softmax = softmax_of_unit(apply);
    TileState* const state = unit_->state;
    RowsAhead* const asked = ahead;
    F m[kHeldVecs], sum[kHeldVecs], rounded[kHeldVecs];
    for (int v = 0; v < kHeldVecs; ++v) {
      m[v] = load(state->m + softmax.lane + v * kLanes);
      sum[v] = rounded[v] = broadcast(0.0f);
    }
    unrolled<kSteps>([&]<int step>() __attribute__((always_inline)) {
      multiply_before<kPairs, step>(beside);
      if constexpr (step % 2 == 0) ask_for_steps(asked);
      constexpr int kKey = step * kStepKeys, kWithin = kPairs > 2 ? kStepKeys / 2 : kStepKeys;
      F weight[kHeldVecs][kStepKeys], some[kHeldVecs];
#pragma GCC unroll 2
      for (int v = 0; v < kHeldVecs; ++v) {
        some[v] = softmax.template weigh<0, kWithin>(weight[v], kKey, v * kLanes, m[v]);
      }
      multiply_within<kPairs, step>(beside);
#pragma GCC unroll 2
      for (int v = 0; v < kHeldVecs; ++v) {
        const int at = v * kLanes;
        if constexpr (kWithin < kStepKeys) {
          some[v] = softmax.template weigh<kWithin, kStepKeys>(weight[v], kKey, at, m[v], some[v]);
        }
        if constexpr (step == 0) {  // where a row begins, m is always too low
          const M too_low = outside(some[v], kHeadroom);
          if (__builtin_expect(any(too_low), 0) && raise<kPairs>(apply, at, too_low)) {
            m[v] = load(state->m + softmax.lane + at);
            some[v] = softmax.template weigh<0, kStepKeys>(weight[v], kKey, at, m[v]);
            load_again<kPairs>(beside);
          }
        }
        sum[v] = sum[v] + some[v];
        rounded[v] = rounded[v] + softmax.keep(weight[v], kKey, at);
      }
      multiply_behind<kPairs, step>(beside);
    });
    for (int v = 0; v < kHeldVecs; ++v) {
      const int at = v * kLanes;
      const M too_low = outside(sum[v], kHeadroom);
      if (__builtin_expect(any(too_low), 0) && raise<kPairs>(apply, at, too_low)) {
        alignas(64) float sums[2 * kLanes];
        weigh_again(apply, at, sums);
        sum[v] = load(sums), rounded[v] = load(sums + kLanes);
      }
      float* const l = state->l + softmax.lane + at;
      float* const l_rounded = state->l_rounded + softmax.lane + at;
      store(l, load(l) + sum[v]);
      store(l_rounded, load(l_rounded) + fma(sum[v], broadcast(0.0f), rounded[v]));  // NaN, where NearestBf16 lost it
    }
    if constexpr (kPairs > 2) {
      halves_.append(*unit_);
    } else {
      if (products) held_ = before_->out();
      multiplies_ = true;
    }
    swap(before_, unit_);
    waits_ = false;
    turn_ ^= 1;
    if (scores) take_next();
  }

  // The next unit is the one that waits; its P^T lies where that of the unit before does not.
  void take_next() {
    swap(unit_, next_);
    if (unit_->weights == nullptr && pairs_ <= 2) unit_->weights = p_ + turn_ * kTmmRows * kTile;
    waits_ = true;
  }

  alignas(64) float scores_[2][kUnitKeys * kHeldLanes];
  alignas(64) float alpha_[kHeldLanes];
  HeldUnit units_[3];
  HeldUnit *before_ = units_, *unit_ = units_ + 1, *next_ = units_ + 2;
  bool waits_ = false;       // the unit, whose scores are there, for its softmax
  bool multiplies_ = false;  // O lacks the products of the unit before, whose weights are there
  bool raised_ = false;      // m, for those weights: O is to be multiplied by alpha_ before
  OutInHalves halves_;
  int pairs_;  // of registers of 16 dims
  int turn_ = 0;
  float* p_;
  float* held_ = nullptr;  // where O that is in registers belongs
  float factor_;
};

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
