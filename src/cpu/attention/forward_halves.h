// O of more than 64 dims beside HeldOut's softmax: registers hold half of it at a time. Weights of up to 16 units of the same
// queries are kept; while those of the next ones are made, first one half of O and then the other stays in registers and the
// units pass by.
#pragma once

#include "cpu/attention/softmax.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kHeldLanes = kTmmRows, kHeldVecs = kHeldLanes / kLanes;

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

// kPairs: pairs of registers of 16 dims that V^T has, 3 or 4.
class OutInHalves {
 public:
  static constexpr int kMost = 16;  // units of some queries, from one finish() to the next: those of a run
  static constexpr int64_t kFloats = 2 * kMost * kTmmRows * kTmmRows;  // of P^T of two runs

  explicit OutInHalves(float* p) : p_(p) {}
  OutInHalves(const OutInHalves&) = delete;

  // A unit whose weights are to be made: tells where.
  template <int kPairs>
  void open(HeldUnit& unit) {
    if (made_->count > 0 && made_->out != unit.out()) pass_on<kPairs>();
    if (made_->count == 0) made_->out = unit.out(), made_->fresh = unit.fresh;
    if (unit.weights != nullptr) return;
    unit.weights = p_ + place_ / 4 * kTmmRows * kTile + place_ % 4 * kTmmRows;
    place_ = (place_ + 1) % (2 * kMost);  // those of two runs live
  }
  // Its weights are there.
  void append(const HeldUnit& unit) { made_->unit[made_->count++] = {unit.weights, unit.values, unit.value_stride}; }

  // Whether some products of the run before are left. Four of them, of one unit, are product 0 to 3 in turn.
  bool left() const { return multiplied_->left(); }
  template <int kPairs, int i>
  __attribute__((always_inline)) void load_factors() const {
    const Run& run = *multiplied_;
    const Run::Unit& unit = run.unit[run.at];
    if constexpr (i == 0) {
      tmm_load<7>(unit.weights, kTile);
      if (run.at == 0) begin<kPairs>(run);
    }
    if (!has<kPairs, i>(run)) return;
    tmm_load<6, true>(unit.values + (2 * run.half + i / 2) * unit.value_stride + i % 2 * kTmmRows * kTmmRows, kTmmRows);
  }
  template <int kPairs, int i>
  __attribute__((always_inline)) void multiply() {
    Run& run = *multiplied_;
    if (has<kPairs, i>(run)) tmm_dot_bf16<i, 6, 7>();
    if (i < 3 || ++run.at < run.count) return;
    end<kPairs>(run);
    run.at = 0;
    ++run.half;
  }

  // m was raised for the unit that is open: O of its queries [at, at + kLanes), with all weights that came before, is scaled.
  template <int kPairs>
  __attribute__((noinline)) void scale(int at, F alpha) {
    if (made_->count > 0) {
      float* const out = made_->out;
      pass_on<kPairs>();
      multiply_left<kPairs>();
      made_->out = out, made_->fresh = false;
    }
    if (made_->fresh) return;
    float* const out = made_->out + at;
    for (int d = 0; d < kPairs * kDimStep; ++d) store(out + d * kTile, load(out + d * kTile) * alpha);
  }

  template <int kPairs>
  void finish() {
    if (made_->count > 0) pass_on<kPairs>();
    multiply_left<kPairs>();
  }

 private:
  struct Run {
    struct Unit {
      const float* weights;
      const Word* values;
      ptrdiff_t value_stride;
    };
    Unit unit[kMost];
    int count = 0, half = 0, at = 0;  // units; and the next that the half of O is multiplied by
    float* out = nullptr;
    bool fresh = false;

    bool left() const { return count > 0 && half < 2; }
  };

  // Whether that half of the dims has register i.
  template <int kPairs, int i>
  __attribute__((always_inline)) static bool has(const Run& run) {
    return kPairs == 4 || i < 2 || run.half == 0;
  }
  template <int kPairs>
  __attribute__((always_inline)) static void begin(const Run& run) {
    const float* const out = run.out + run.half * 4 * kTmmRows * kTile;
    unrolled<4>([&]<int i>() __attribute__((always_inline)) {
      if (!has<kPairs, i>(run)) return;
      if (run.fresh) {
        tmm_zero<i>();
      } else {
        tmm_load<i>(out + i * kTmmRows * kTile, kTile);
      }
    });
  }
  template <int kPairs>
  __attribute__((always_inline)) static void end(const Run& run) {
    float* const out = run.out + run.half * 4 * kTmmRows * kTile;
    unrolled<4>([&]<int i>() __attribute__((always_inline)) {
      if (has<kPairs, i>(run)) tmm_store<i>(out + i * kTmmRows * kTile, kTile);
    });
  }

  template <int kPairs>
  __attribute__((noinline)) void multiply_left() {
    while (left()) {
      unrolled<4>([&]<int i>() {
        load_factors<kPairs, i>();
        multiply<kPairs, i>();
      });
    }
  }

  // The run that was made is multiplied next.
  template <int kPairs>
  void pass_on() {
    multiply_left<kPairs>();
    swap(made_, multiplied_);
    multiplied_->half = multiplied_->at = 0;
    made_->count = 0;
  }

  Run runs_[2];
  Run *made_ = runs_, *multiplied_ = runs_ + 1;
  float* p_;
  int place_ = 0;  // of the next weights
};

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
