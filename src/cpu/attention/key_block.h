// A block of keys as a tile of queries works on it in forward: loading it, and its probabilities.
//   Q^T [D][kTile]   K, V [kBlock][D]   S^T, P^T [kBlock][kTile]   O^T [Dv][kTile]   m, l [kTile]
#pragma once

#include "cpu/attention/functions.h"
#include "cpu/attention/softmax.h"
#include "cpu/attention/view.h"
#include "cpu/isa/rows_ahead.h"
#ifdef POLYHEAD_HAS_TMM
#include "cpu/attention/forward_tmm.h"
#include "cpu/attention/wild_scores.h"
#endif

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

#ifdef POLYHEAD_HAS_TMM
static_assert(kPartKeys == kUnitKeys && kPartVecs % kHeldVecs == 0);
static_assert(OutInHalves::kFloats <= kBlock * kTile / 2 * kMostPlanes && OutInHalves::kMost * kUnitKeys % kBlock == 0);
constexpr int kRunBlocks = 8;  // of keys that are loaded together at most, where O is held
constexpr int kRunBlocksInHalves = OutInHalves::kMost * kUnitKeys / kBlock;  // the same of more dims than kHeldDims
static_assert(kRunBlocksInHalves <= kRunBlocks);
// Whether it may be: of keys and values of as many registers.
constexpr bool held_dims(int64_t head_dim, int64_t head_dim_v) {
  const int64_t dim = whole(head_dim, kDimStep);
  return dim == whole(head_dim_v, kDimStep) && dim > 0 && dim <= 2 * kHeldDims;
}
#else
class HeldOut;
constexpr int kHeldLanes = kTile, kRunBlocks = 1, kRunBlocksInHalves = 1, kHeldDims = 0;
constexpr bool held_dims(int64_t, int64_t) { return false; }
#endif

struct Tile : QueryTile {
  TileState state;
  float* query;      // Q^T, words
  Wild wild;         // of its queries
  bool some_hidden;  // in a block that was computed
  bool fresh;        // O^T holds nothing yet, but what lay there
};

struct ForwardMemory {
  Tile tile[kForwardTiles];
  alignas(64) float p[kBlock * kTile / 2 * kMostPlanes];
  ViewMemory view;
  RowsAhead ahead;
  PoolPlace key_places[kRunBlocks * kBlock], value_places[kRunBlocks * kBlock];  // of blocks whose pages lie apart
};

constexpr size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

struct Head : HeadOptions {
  const ForwardTask& task;
  KeyRows key, value;
  ForwardMemory* scratch;
  float *key_copy, *value_copy;  // of as many blocks as `held` computes together, if there is one, else of one
  float* value_copy_before;      // without `held`: of the block before, which `later` may read
  Later* later;                  // O of queries whose weights are there
  HeldOut* held;                 // which computes O instead; null: it does not
  bool rounded_p;                // P is bfloat16 where it multiplies V
  bool by_planes;                // P and V are multiplied as planes, which makes NaN of inf
  bool careful;                  // NaN or inf among hidden values: see add_not_finite
};

// Where `place`: that of a run whose blocks stay.
template <class Mac>
KeyBlock load_block(const Head& head, int64_t first, int place = 0) {
  const Problem& problem = head.problem;
  const int64_t left = head.task.sequence.len_k - first;
  KeyBlock block{first, left < kBlock ? static_cast<int>(left) : kBlock, {}, {}};
  const int64_t padded = end_of_parts(block.num_keys);
  const Rows key = head.key.at(first, block.num_keys, head.scratch->key_places);
  block.key = rows_as_words<Mac>(head.key_copy + place * kBlock * row_words<Mac>(problem.head_dim), key, 0,
                                 block.num_keys, padded, problem.head_dim);
#ifdef POLYHEAD_HAS_TMM
  if constexpr (Mac::kPlanes > 1) block.wild = wild_rows(block.key, block.num_keys, row_words<Mac>(problem.head_dim));
#endif
  const Rows value = head.value.at(first, block.num_keys, head.scratch->value_places);
  float* const values = head.value_copy + place * (kBlock / Mac::kElements) * whole(problem.head_dim_v, kDimStep);
  block.value = values_as_words<Mac>(values, value, 0, block.num_keys, whole(padded, Mac::kElements),
                                     problem.head_dim_v, head.careful);
  return block;
}

// Of a softmax, or where the scores are the weights, and of each way to scores: functions of their own, as with_way says.
template <class Mac, class PMac, bool kSoftmax, ScoreWay kWay>
void weigh_keys(const Head& head, Tile& tile, const KeyBlock& block, const BlockView& view, const Part& part,
                bool into_out) {
  const int64_t words = words_of(head.problem.head_dim, Mac::kElements);
  const bool masked = !kSoftmax && head.score.hides(view);
  // By value, all of them: what a closure only refers to is read again after each store of a register tmm.
  const Score* const score = &head.score;
  const BlockView* const of = &view;
  float* const p = head.scratch->p;
  TileState* const state = &tile.state;
  const float factor = head.score.to_log2;
  const auto kept = view.kept;
  const auto weigh = [=]<int kRows, int kVecs_>(F(&s)[kRows][kVecs_], int key, int lane, const auto&... beside) {
    if constexpr (kSoftmax) {
      softmax_step<Mac, PMac>(s, p, *state, factor, kept, key, lane, beside...);
    } else {
      score_step<PMac>(s, p, *score, *of, masked, key, lane);
    }
  };
  const auto done = [&](int v_begin, int v_end) {
    if (!into_out) return;
    if constexpr (kSoftmax) {
      follow_maximum(tile.state, head.score.to_log2, v_begin, v_end, head.problem.head_dim_v, tile.fresh);
    }
    accumulate<Mac, kForwardSums>(*head.later, TileSums{tile.state.out, tile.fresh}, head.scratch->p, block.value,
                                  part.begin / Mac::kElements, words_of(part.end, Mac::kElements),
                                  head.problem.head_dim_v, v_begin, v_end);
  };
  [[maybe_unused]] const Tile* const of_queries = &tile;
  [[maybe_unused]] const KeyBlock* const of_keys = &block;
  const auto apply = [=]<int kRows, int kVecs_>(F(&s)[kRows][kVecs_], int key, int lane)
      __attribute__((always_inline)) {
#ifdef POLYHEAD_HAS_TMM
    if constexpr (Mac::kPlanes > 1) {
      if (__builtin_expect(of_queries->wild.any || of_keys->wild.any, 0)) {
        mend_scores(s, of_queries->query, of_queries->wild, of_keys->key, of_keys->wild, words, key, lane);
      }
    }
#endif
    score->template apply<kWay>(s, *of, key, lane);
  };
  if constexpr (kWay == ScoreWay::kAny) {
    if (head.score.by_program) {
      return score_by_program<Mac, kForwardSums>(head, tile.query, words, block.key, view, part, *head.later, apply,
                                                 weigh, done);
    }
  }
  for_each_product<Mac, kForwardSums>(
      tile.query, words, block.key, part, *head.later,
      [apply, weigh]<int kRows, int kVecs_>(F(&s)[kRows][kVecs_], int key, int lane, const auto&... beside) {
        apply(s, key, lane);
        weigh(s, key, lane, beside...);
      },
      done);
}

#ifdef POLYHEAD_HAS_TMM
// How HeldOut makes scores of products. kAny: and dropout takes weights.
template <ScoreWay kWay>
struct HeldScores {
  static constexpr bool kDrops = kWay == ScoreWay::kAny;
  const Score* score;
  const BlockView* view;

  template <int kRows>
  __attribute__((always_inline)) void operator()(F (&s)[kRows][1], int key, int lane) const {
    score->template apply<kWay>(s, *view, key, lane);
  }
};

inline HeldUnit& next_unit(const Head& head, Tile& tile, const KeyBlock& block, int key, int lane) {
  HeldUnit& unit = head.held->next();
  unit.state = &tile.state;
  unit.key = key, unit.lane = lane;
  unit.query = tile.query + lane;
  unit.keys = block.key.data + key * block.key.stride;
  unit.key_stride = block.key.stride;
  unit.values = block.value.data + key / kUnitKeys * block.value.step_words;
  unit.value_stride = block.value.stride;
  unit.kept = nullptr;
  unit.weights = nullptr;
  unit.fresh = tile.fresh;
  return unit;
}
// Of a tile, those that hold a query.
inline int held_vecs(const Tile& tile) { return static_cast<int>(whole(tile.num_queries, kHeldLanes)) / kLanes; }

// All of blocks that follow each other, of whose scores nothing is hidden or changed: O of 16 queries stays while they pass by.
__attribute__((noinline)) void hold_blocks(const Head& head, Tile& tile, const KeyBlock* blocks, int num_blocks) {
  for (int v = 0; v < held_vecs(tile); v += kHeldVecs) {
    for (int b = 0; b < num_blocks; ++b) {
      for (int key = 0; key < blocks[b].num_keys; key += kUnitKeys) {
        next_unit(head, tile, blocks[b], key, v * kLanes);
        head.held->add(HeldOut::Products());
      }
    }
  }
  tile.fresh = false;
}

// Scores, weights and O of one part, up to what HeldOut does beside the units that follow.
template <ScoreWay kWay>
__attribute__((noinline)) void hold_keys(const Head& head, Tile& tile, const KeyBlock& block, const BlockView& view,
                                         const Part& part) {
  const HeldOut::Products products;
  const HeldScores<kWay> apply{&head.score, &view};
  bool first = true;  // the unit before is another part's, of products alone
  for (int v = part.v_begin; v < part.v_end && v < held_vecs(tile); v += kHeldVecs) {
    for (int key = part.begin; key < part.end; key += kUnitKeys, first = false) {
      HeldUnit& unit = next_unit(head, tile, block, key, v * kLanes);
      unit.kept = view.kept;
      if (head.careful) unit.weights = head.scratch->p + key / 2 * kTile + unit.lane;
      if (first || kWay == ScoreWay::kProducts) {
        head.held->add(products);
      } else if constexpr (kWay != ScoreWay::kProducts) {
        head.held->add(apply);
      }
    }
  }
  if constexpr (kWay != ScoreWay::kProducts) head.held->rest(apply);
}
#endif

// P^T of one part, in words of PMac; with `into_out` also O^T += P^T V, which the second pass leaves out: of float32 both
// passes share this function.
template <class Mac, class PMac>
void score_keys(const Head& head, Tile& tile, const KeyBlock& block, const BlockView& view, const Part& part,
                bool into_out) {
  if (!head.problem.softmax) {
    return weigh_keys<Mac, PMac, false, ScoreWay::kAny>(head, tile, block, view, part, into_out);
  }
#ifdef POLYHEAD_HAS_TMM
  if constexpr (Mac::kPlanes == 1) {
    if (into_out && head.held != nullptr) {
      const SubnormalsAsZero as_registers_do;
      if (view.kept != nullptr) return hold_keys<ScoreWay::kAny>(head, tile, block, view, part);
      return head.score.with_way(view, [&]<ScoreWay kWay>() { hold_keys<kWay>(head, tile, block, view, part); });
    }
  }
#endif
  head.score.with_way(
      view, [&]<ScoreWay kWay>() { weigh_keys<Mac, PMac, true, kWay>(head, tile, block, view, part, into_out); });
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
