// Forward of bfloat16 pairs in registers of 16 x 16 words, of up to 64 dims: O^T of 16 queries stays in registers while units
// of 32 keys pass by. Beside softmax of one unit, which the vectors compute, the registers make the scores of the next, then
// add the weights of the one before times V; no unit waits for its own products. docs/cores.md tells what that gains. All but
// what describes a unit is called while SubnormalsAsZero is there.
#pragma once

#include "cpu/attention/softmax.h"
#include "cpu/isa/rows_ahead.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kHeldLanes = kTmmRows, kHeldVecs = kHeldLanes / kLanes;
constexpr int64_t kHeldDims = 64;  // O in registers 0 to 3, scores in 4 and 5, two factors

// 32 keys of 16 queries.
struct HeldUnit {
  TileState* state = nullptr;
  int key = 0, lane = 0;  // of the block, and of the tile
  const float* query = nullptr;
  const Word* keys = nullptr;
  ptrdiff_t key_stride = 0;
  const Word* values = nullptr;  // V^T: two registers of 16 dims, and value_stride behind them the next two
  ptrdiff_t value_stride = 0;
  const uint16_t (*kept)[kVecs] = nullptr;  // see BlockView
  float* weights = nullptr;                 // where P^T is to lie, [16 words][kTile]; null: anywhere
  bool fresh = false;                       // O of these queries holds nothing yet

  float* out() const { return state->out + lane; }
};

template <int kEnd, class Work, int i = 0>
inline __attribute__((always_inline)) void unrolled(const Work& work) {
  if constexpr (i < kEnd) {
    work.template operator()<i>();
    unrolled<kEnd, Work, i + 1>(work);
  }
}

class HeldOut : public Asking {
 public:
  // apply(), where products are the scores.
  struct Products {
    static constexpr bool kDrops = false;  // whether dropout may take weights
    template <int kRows>
    void operator()(F (&)[kRows][1], int, int) const {}
  };

  // p: 32 x kTile words. factor: what scores are multiplied by to be powers of 2.
  HeldOut(RowsAhead* asked, float* p, int64_t dims, float factor)
      : Asking{asked}, wide_(dims > kDimStep), p_(p), factor_(factor) {}
  HeldOut(const HeldOut&) = delete;

  // Where the unit is described that add() then takes: in place, for a copy would be read before it is written.
  HeldUnit& next() { return *next_; }

  // Scores of the next unit are made, beside softmax of the one before it, whose products apply(s, key, lane) makes scores.
  template <class Apply>
  void add(const Apply& apply) {
    if (waits_) return wide_ ? advance<2>(apply, true) : advance<1>(apply, true);
    wide_ ? make_scores<2>(*next_) : make_scores<1>(*next_);
    take_next();
  }

  // Softmax of the last unit: apply() and what it reads may go then.
  template <class Apply>
  void rest(const Apply& apply) {
    if (waits_) wide_ ? advance<2>(apply, false) : advance<1>(apply, false);
  }

  // All products with V, and O in memory. A unit that waits for its softmax is one whose products are scores.
  __attribute__((noinline)) void finish() {
    rest(Products());
    wide_ ? finish_products<2>() : finish_products<1>();
  }

 private:
  static constexpr int kSteps = 8, kStepKeys = kUnitKeys / kSteps;

  // Product i of a unit's scores: 16 keys, 16 words of each.
  template <int i>
  __attribute__((always_inline)) static void load_factors_of_scores(const HeldUnit& unit) {
    constexpr int kWord = i / 2 * kTmmRows, kHalf = i % 2;
    if constexpr (kHalf == 0) tmm_load<7>(unit.query + kWord * kTile, kTile);
    tmm_load<6>(unit.keys + kHalf * kTmmRows * unit.key_stride + kWord, unit.key_stride);
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
    tmm_load<6>(unit.values + i / 2 * unit.value_stride + i % 2 * kTmmRows * kTmmRows, kTmmRows);
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
  template <class Apply>
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
    for (int i = 0; i < kHeldLanes && !raised_; i += kLanes) store(alpha_ + i, broadcast(1.0f));
    store(alpha_ + at, load(alpha_ + at) * alpha);
    raised_ = true;
    return true;
  }

  // What softmax of a unit reads: copied into registers, for what the object holds is read again after each store.
  template <class Apply>
  struct Softmax {
    const float* scores;
    float* weights;
    const uint16_t (*kept)[kVecs];
    int key, lane;
    F factor, ones;
    Apply apply;

    __attribute__((always_inline)) void load_scores(F (&s)[kStepKeys][1], int first, int at) const {
#pragma GCC unroll 8
      for (int r = 0; r < kStepKeys; ++r) s[r][0] = load(scores + (first + r) * kHeldLanes + at);
      apply(s, key + first, lane + at);
    }
    // Weights of kStepKeys keys, from `first` of the unit on, of one vector of queries. Returned: their sum.
    __attribute__((always_inline)) F weigh(F (&weight)[kStepKeys], int first, int at, F m) const {
      F s[kStepKeys][1];
      load_scores(s, first, at);
#pragma GCC unroll 8
      for (int r = 0; r < kStepKeys; ++r) weight[r] = exp2_flushed((s[r][0] - m) * factor);
      F sum = weight[0];
#pragma GCC unroll 8
      for (int r = 1; r < kStepKeys; ++r) sum = sum + weight[r];
      return sum;
    }
    // The same as words of P^T. Returned: the sum of the undropped ones as they are rounded there.
    __attribute__((always_inline)) F keep(F (&weight)[kStepKeys], int first, int at) const {
      float* const words = weights + first / 2 * kTile + at;
      if (Apply::kDrops && kept != nullptr) {
        return store_weights_of<BFloat16Pair, true>(weight, words, kept, key + first, lane + at);
      }
      F rounded = broadcast(0.0f);
      for (int r = 0; r < kStepKeys; r += 2) {
        const F word = pair_bf16(weight[r], weight[r + 1]);
        store(words + r / 2 * kTile, word);
        rounded = dot_bf16(rounded, word, ones);
      }
      return rounded;
    }
  };

  template <class Apply>
  Softmax<Apply> softmax_of_unit(const Apply& apply) const {
    const HeldUnit& unit = *unit_;
    return {scores_[turn_],
            unit.weights,
            unit.kept,
            unit.key,
            unit.lane,
            broadcast(factor_),
            pair_bf16(broadcast(1.0f), broadcast(1.0f)),
            apply};
  }

  // All weights of a vector of queries once more, under a raised m.
  template <class Apply>
  __attribute__((noinline)) void weigh_again(const Apply& apply, int at, float* sums) const {
    const Softmax<Apply> softmax = softmax_of_unit(apply);
    const F m = load(unit_->state->m + unit_->lane + at);
    F sum = broadcast(0.0f), rounded = broadcast(0.0f);
    for (int key = 0; key < kUnitKeys; key += kStepKeys) {
      F weight[kStepKeys];
      sum = sum + softmax.weigh(weight, key, at, m);
      rounded = rounded + softmax.keep(weight, key, at);
    }
    store(sums, sum);
    store(sums + kLanes, rounded);
  }

  __attribute__((noinline)) static void ask_for_step(RowsAhead* asked) { asked->ask(kStepKeys * kHeldLanes); }

  // Softmax of the unit; beside it the scores of the next, if there is one, and O of the unit before. Products need as long as
  // four vectors of weights each, and their factors are loaded as long before.
  template <int kPairs, class Apply>
  __attribute__((noinline)) void advance(const Apply& apply, bool scores) {
    if (__builtin_expect(raised_, 0)) follow<kPairs>();
    const Softmax<Apply> softmax = softmax_of_unit(apply);
    TileState* const state = unit_->state;
    const bool products = multiplies_, changes = products && held_ != before_->out();
    const HeldUnit &of_scores = *next_, &of_out = *before_;
    RowsAhead* const asked = ahead;
    F m[kHeldVecs], sum[kHeldVecs], rounded[kHeldVecs];
    for (int v = 0; v < kHeldVecs; ++v) {
      m[v] = load(state->m + softmax.lane + v * kLanes);
      sum[v] = rounded[v] = broadcast(0.0f);
    }
    unrolled<kSteps>([&]<int step>() __attribute__((always_inline)) {
      constexpr int kOfUnit = 2 * kPairs;  // products of scores, then of O
      constexpr int kEvery = kSteps / (2 * kOfUnit), kProduct = step / kEvery % kOfUnit;
      constexpr bool kOfScores = step < kSteps / 2, kMultiplies = step % kEvery == 0;
      if constexpr (step < kOfUnit) {
        if (changes) change_out<step>();
      }
      if constexpr (kMultiplies && kOfScores) {
        if (scores) load_factors_of_scores<kProduct>(of_scores);
      } else if constexpr (kMultiplies) {
        if (products) load_factors_of_out<kProduct>(of_out);
      }
      ask_for_step(asked);
#pragma GCC unroll 2
      for (int v = 0; v < kHeldVecs; ++v) {
        const int at = v * kLanes;
        F weight[kStepKeys];
        F some = softmax.weigh(weight, step * kStepKeys, at, m[v]);
        if constexpr (step == 0) {  // where a row begins, m is always too low
          const M too_low = outside(some, kHeadroom);
          if (__builtin_expect(any(too_low), 0) && raise(apply, at, too_low)) {
            m[v] = load(state->m + softmax.lane + at);
            some = softmax.weigh(weight, step * kStepKeys, at, m[v]);
          }
        }
        sum[v] = sum[v] + some;
        rounded[v] = rounded[v] + softmax.keep(weight, step * kStepKeys, at);
      }
      if constexpr (kMultiplies && kOfScores) {
        if (scores) multiply_scores<kProduct>();
      } else if constexpr (kMultiplies) {
        if (products) tmm_dot_bf16<kProduct, 6, 7>();
      }
      if constexpr (step == kSteps / 2 || step == kSteps / 2 + 1) {
        if (scores) store_scores<step - kSteps / 2>(turn_ ^ 1);
      }
    });
    for (int v = 0; v < kHeldVecs; ++v) {
      const int at = v * kLanes;
      const M too_low = outside(sum[v], kHeadroom);
      if (__builtin_expect(any(too_low), 0) && raise(apply, at, too_low)) {
        alignas(64) float sums[2 * kLanes];
        weigh_again(apply, at, sums);
        sum[v] = load(sums), rounded[v] = load(sums + kLanes);
      }
      float* const l = state->l + softmax.lane + at;
      float* const l_rounded = state->l_rounded + softmax.lane + at;
      store(l, load(l) + sum[v]);
      store(l_rounded, load(l_rounded) + rounded[v]);
    }
    if (products) held_ = before_->out();
    swap(before_, unit_);
    multiplies_ = true;
    waits_ = false;
    turn_ ^= 1;
    if (scores) take_next();
  }

  // The next unit is the one that waits; its P^T lies where that of the unit before does not.
  void take_next() {
    swap(unit_, next_);
    if (unit_->weights == nullptr) unit_->weights = p_ + turn_ * kTmmRows * kTile;
    waits_ = true;
  }

  alignas(64) float scores_[2][kUnitKeys * kHeldLanes];
  alignas(64) float alpha_[kHeldLanes];
  HeldUnit units_[3];
  HeldUnit *before_ = units_, *unit_ = units_ + 1, *next_ = units_ + 2;
  bool waits_ = false;       // the unit, whose scores are there, for its softmax
  bool multiplies_ = false;  // O lacks the products of the unit before, whose weights are there
  bool raised_ = false;      // m, for those weights: O is to be multiplied by alpha_ before
  bool wide_;
  int turn_ = 0;
  float* p_;
  float* held_ = nullptr;  // where O that is in registers belongs
  float factor_;
};

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
