// The products of tile.h on registers of 16 x 16 words, where the instruction set has them: a queue of such products is
// issued a step at a time between vector operations, so that both run at once.
//
// Measured on Xeons (docs/cores.md): a product of registers takes 16 cycles whatever the number of sums, a load of a register 8
// from L1, or 1 beside a product, but 20 from L2. So four sums share what is read: 32 rows times 32 columns.
#pragma once

#include "cpu/isa/rows_ahead.h"
#include "cpu/isa/tile.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kTmmRows = 16;       // and words of a row
constexpr int kUnitKeys = kGroup;  // two registers of scores; the pairs of keys that one register of P^T or V^T holds
constexpr int kUnitLanes = kPartLanes;
constexpr ptrdiff_t kWeightsPlane = 64 * kTile;  // words between planes of P^T, of a block of keys
static_assert(kUnitKeys == 2 * kTmmRows && kUnitLanes == 2 * kTmmRows);

// Sums in registers 0 and 1 over 16 words: of rows 0 to 15 and 16 to 31 of A, times 16 columns of B, and in 2 and 3 the same
// of the next 16 columns. kOnce: A leaves L1 to B. kHalves 1: rows 0 to 15 alone.
template <int kSides, bool kOnce = false, int kHalves = 2>
inline __attribute__((always_inline)) void multiply(const Word* a, ptrdiff_t a_stride, const float* b,
                                                    ptrdiff_t b_stride) {
  tmm_load<6>(b, b_stride);
  tmm_load<4, kOnce>(a, a_stride);
  tmm_dot_bf16<0, 4, 6>();
  if constexpr (kHalves == 2) {
    tmm_load<5, kOnce>(a + kTmmRows * a_stride, a_stride);
    tmm_dot_bf16<1, 5, 6>();
  }
  if constexpr (kSides == 2) {
    tmm_load<7>(b + kTmmRows, b_stride);
    tmm_dot_bf16<2, 4, 7>();
    if constexpr (kHalves == 2) tmm_dot_bf16<3, 5, 7>();
  }
}

// The same of 32 columns, of operands in planes (planes.h), in kPlaneSteps steps, the least products first: what a step does not
// load is in registers since those before it.
constexpr int kPlaneSteps = 6;
inline __attribute__((always_inline)) void multiply_planes(int step, const Word* a, const float* b, ptrdiff_t b_stride,
                                                           ptrdiff_t b_plane) {
  const auto load_a = [=](int plane) __attribute__((always_inline)) {
    const Word* const at = a + (Float32Planes::kPlanes - 1 - plane) * kRegisterPair;
    tmm_load<4>(at, kTmmRows);
    tmm_load<5>(at + kTmmRows * kTmmRows, kTmmRows);
  };
  const auto load_b = [=](int plane) __attribute__((always_inline)) {
    tmm_load<6>(b + plane * b_plane, b_stride);
    tmm_load<7>(b + plane * b_plane + kTmmRows, b_stride);
  };
  switch (step) {
    case 0: load_a(2), load_b(0); break;
    case 1: load_a(1); break;
    case 2: load_b(1); break;
    case 3: load_a(0); break;
    case 4: load_b(2); break;
    default: load_b(0);
  }
  tmm_dot_bf16<0, 4, 6>();
  tmm_dot_bf16<1, 5, 6>();
  tmm_dot_bf16<2, 4, 7>();
  tmm_dot_bf16<3, 5, 7>();
}

template <int kSides>
inline __attribute__((always_inline)) void clear_sums() {
  tmm_zero<0>();
  tmm_zero<1>();
  if constexpr (kSides == 2) {
    tmm_zero<2>();
    tmm_zero<3>();
  }
}

template <int kSides>
inline __attribute__((always_inline)) void load_sums(const float* sums, ptrdiff_t stride) {
  tmm_load<0>(sums, stride);
  tmm_load<1>(sums + kTmmRows * stride, stride);
  if constexpr (kSides == 2) {
    tmm_load<2>(sums + kTmmRows, stride);
    tmm_load<3>(sums + kTmmRows * stride + kTmmRows, stride);
  }
}

template <int kSides, int kHalves = 2>
inline __attribute__((always_inline)) void store_sums(float* sums, ptrdiff_t stride) {
  tmm_store<0>(sums, stride);
  if constexpr (kHalves == 2) tmm_store<1>(sums + kTmmRows * stride, stride);
  if constexpr (kSides == 2) {
    tmm_store<2>(sums + kTmmRows, stride);
    if constexpr (kHalves == 2) tmm_store<3>(sums + kTmmRows * stride + kTmmRows, stride);
  }
}

// X^T [32 keys][32 queries] = rows A^T.
template <class Mac>
class UnitProduct {
 public:
  UnitProduct(const float* a, int64_t words, const Words& rows) : a_(a), words_(words), rows_(rows) {}

  int64_t steps() const {  // left
    const int64_t units = whole(words_ - word_, kTmmRows) / kTmmRows;
    return Mac::kPlanes == 1 ? units : units * kPlaneSteps - plane_step_;
  }

  // The sums will lie at `sums`.
  void start(int key, int lane, float* sums) {
    word_ = 0, plane_step_ = 0;
    row_ = rows_.data + (Mac::kPlanes == 1 ? key : key / kUnitKeys) * rows_.stride;
    query_ = a_ + lane;
    sums_ = sums;
    if (words_ == 0) __builtin_memset(sums, 0, kUnitKeys * kUnitLanes * sizeof(float));
  }
  void step() {
    if (word_ == 0 && (Mac::kPlanes == 1 || plane_step_ == 0)) clear_sums<2>();
    if constexpr (Mac::kPlanes == 1) {
      multiply<2>(row_ + word_, rows_.stride, query_ + word_ * kTile, kTile);
    } else {
      multiply_planes(plane_step_, row_ + word_ / kTmmRows * rows_.step_words, query_ + word_ * kTile, kTile,
                      whole(words_, kTmmRows) * kTile);
      if (++plane_step_ < kPlaneSteps) return;
      plane_step_ = 0;
    }
    word_ += kTmmRows;
    if (word_ >= words_) store_sums<2>(sums_, kUnitLanes);
  }

 private:
  const float* a_;
  int64_t words_;
  Words rows_;
  int64_t word_ = 0;
  int plane_step_ = 0;
  const Word* row_ = nullptr;
  const float* query_ = nullptr;
  float* sums_ = nullptr;
};

// A product of 32 queries that waits: O^T[dims][queries] += V^T P^T, 32 dims after the other, each over all its keys. V^T lies
// as rows of dims, words along the keys (in_registers).
class Later : public Asking {
 public:
  int64_t products() const { return (dims_ - dim_) / kDimStep; }  // left
  template <class Mac>
  int64_t steps_each() const {
    return Mac::kPlanes == 1 ? units_ : units_ * kPlaneSteps;
  }
  bool waits_for(int lane) const { return dim_ < dims_ && lane_ == lane; }
  bool reads(const Word* value) const { return dim_ < dims_ && value_ == value; }

  // fresh: the sums begin at 0, whatever lies there.
  void start(float* out, bool fresh, const float* p, const Words& value, int64_t first_word, int64_t words,
             int64_t dims, int lane) {
    finish();
    out_ = out + lane;
    fresh_ = fresh;
    p_ = p + first_word * kTile + lane;
    value_ = value.data;
    row_ = value.data + first_word / kTmmRows * value.step_words;
    row_words_ = value.stride;
    step_words_ = value.step_words;
    units_ = words / kTmmRows;
    dims_ = whole(dims, kDimStep);
    lane_ = lane;
    dim_ = unit_ = 0, plane_step_ = 0;
  }

  template <class Mac>
  void step() {
    if (unit_ == 0 && (Mac::kPlanes == 1 || plane_step_ == 0)) begin();
    const Word* const value = row_ + unit_ * Mac::kPlanes * kRegisterPair;
    const float* const p = p_ + unit_ * kTmmRows * kTile;
    if constexpr (Mac::kPlanes == 1) {
      multiply<2>(value, kTmmRows, p, kTile);
    } else {
      multiply_planes(plane_step_, value, p, kTile, kWeightsPlane);
      if (++plane_step_ < kPlaneSteps) return;
      plane_step_ = 0;
    }
    if (++unit_ < units_) return;
    store_sums<2>(out_, kTile);
    out_ += kDimStep * kTile;
    row_ += row_words_;
    dim_ += kDimStep;
    unit_ = 0;
  }

  void finish() {
    while (dim_ < dims_) step_words_ == kRegisterPair ? step<BFloat16Pair>() : step<Float32Planes>();
  }

 private:
  void begin() {
    if (fresh_) {
      clear_sums<2>();
    } else {
      load_sums<2>(out_, kTile);
    }
  }

  float* out_ = nullptr;
  bool fresh_ = false;
  const float* p_ = nullptr;
  const Word *value_ = nullptr, *row_ = nullptr;
  ptrdiff_t row_words_ = 0, step_words_ = 0;  // of 32 dims, and of 16 words of these
  int64_t units_ = 0, dims_ = 0, dim_ = 0, unit_ = 0;
  int lane_ = 0, plane_step_ = 0;
};

// sums.out, from 0 if they are fresh, += P^T V over the words [begin, end) of keys, for the vectors [v_begin, v_end) of the tile: later.
template <class Mac, int, class Sums>
inline void accumulate(Later& later, const Sums& sums, const float* p, const Words& value, int64_t begin, int64_t end,
                       int64_t dim, int v_begin, int v_end) {
  for (int v = v_begin; v < v_end; v += kPartVecs) {
    later.start(sums.out, sums.fresh, p, value, begin, end - begin, dim, v * kLanes);
  }
}

// Calls take(x, key, lane) for the sums of a unit, 4 keys of kVecs_ vectors at a time. Meanwhile the next unit's are made, then so
// many of the products that wait that the last ends with the last of units_left units: whole ones, for all take the same
// registers. Of planes take(x, key, lane, beside) may call beside() once, so that few products wait at a time.
template <class Mac, int kVecs_, class Take>
inline __attribute__((always_inline)) void take_unit(const float* sums, int key, int lane, UnitProduct<Mac>& next,
                                                     Later& later, int units_left, const Take& take) {
  constexpr int kRows = micro_rows(kPartVecs, kForwardSums), kParts = kPartVecs / kVecs_;
  constexpr int kTakes = kUnitKeys / kRows * kParts, kPoints = Mac::kPlanes > 1 ? 2 * kTakes : kTakes;
  int64_t next_steps = next.steps();
  const int64_t products = (later.products() + units_left - 1) / units_left;
  const int64_t steps = next_steps + products * later.steps_each<Mac>();
  int64_t done = 0;
  int points = 0;
  const auto beside = [&]() __attribute__((always_inline)) {
    ++points;
    for (; done * kPoints < steps * points; ++done) {
      if (next_steps > 0) {
        next.step();
        --next_steps;
      } else {
        later.step<Mac>();
      }
    }
  };
  for (int taken = 1; taken <= kTakes; ++taken) {
    beside();
    F x[kRows][kVecs_];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs_; ++v) x[i][v] = load(sums + i * kUnitLanes + v * kLanes);
    }
    if constexpr (Mac::kPlanes > 1) {
      take(x, key, lane, beside);
      if (points < 2 * taken) beside();  // who takes it need not
    } else {
      take(x, key, lane);
    }
    later.ask(kRows * kVecs_ * kLanes);
    if (kParts > 1 && taken % kParts != 0) {
      sums += kVecs_ * kLanes, lane += kVecs_ * kLanes;
    } else {
      const int back = (kParts - 1) * kVecs_ * kLanes;
      key += kRows, sums += kRows * kUnitLanes - back, lane -= back;
    }
  }
}

// 32 keys and kPanels x 16 columns of add_keys.
template <int kPanels>
inline void add_key_unit(float* out, ptrdiff_t out_stride, const QueryTerms* terms, int num_terms, int key,
                         int64_t column) {
  load_sums<kPanels>(out, out_stride);
  const int group = key / kGroup;
  for (int t = 0; t < num_terms; ++t) {
    const QueryTerms& x = terms[t];
    const float* rows = x.rows + column / kKeyColumns * x.panel_stride;
    constexpr ptrdiff_t kWeightsStride = kTile / 2;
    const Word* weights = x.weights + key * kWeightsStride;
    for (int word = x.begin[group] / kTmmRows * kTmmRows; word < x.end[group]; word += kTmmRows) {
      multiply<kPanels>(weights + word, kWeightsStride, rows + word * kKeyColumns, kKeyColumns);
    }
  }
  store_sums<kPanels>(out, out_stride);
}

// out[key][column] += sum over the queries of weights[key][query] * rows[query][column], tile after tile; `columns` are a
// multiple of 16, num_keys of kGroup. Weights and rows are 0 up to whole registers of the words that a term tells.
template <class Mac>
void add_keys(const Asking&, float* out, int64_t columns, const QueryTerms* terms, int num_terms, int num_keys) {
  for (int64_t column = 0; column < columns; column += kKeyColumns) {
    for (int key = 0; key < num_keys; key += kGroup) {
      if (!any_words(terms, num_terms, key / kGroup)) continue;
      float* sums = out + key * columns + column;
      if (columns - column < kKeyColumns) {
        add_key_unit<1>(sums, columns, terms, num_terms, key, column);
      } else {
        add_key_unit<2>(sums, columns, terms, num_terms, key, column);
      }
    }
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
