// What a tile of queries sees of a block of keys, and in which parts that is computed: forward and backward alike.
#pragma once

#include "cpu/attention/score.h"
#include "cpu/isa/dropout.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kBlock = 128;     // keys
constexpr int kGroup = kLanes;  // keys of a block that share a range of vectors, where not every query sees all

struct QueryTile {
  TileRanges ranges;
  int64_t first_query;
  int num_queries;
};

struct ViewScratch {
  alignas(64) float diagonal[kTile];
  BlockRanges ranges;
  uint16_t kept[kBlock][kVecs];
  float* additive;  // [kBlock][kTile], only with a mask or bias
};

// One head of one sequence, and what is done to its scores.
struct HeadOptions {
  const Problem& problem;
  const Sequence& sequence;
  int64_t b, h;
  Additive additive;
  ScoreRule rule;
  ViewScratch* view_scratch;
};

// Keys [begin, end), multiples of kMicroRows, as the vectors [v_begin, v_end) see them; the other vectors see none.
struct Part {
  int begin = 0, end = 0, v_begin = 0, v_end = 0;
  bool all = true;  // every query sees every key, up to mask and bias

  bool continues(const Part& before) const {
    return begin == before.end && v_begin == before.v_begin && v_end == before.v_end && all == before.all;
  }
};

// What a tile sees of a block, and in which parts it is computed.
struct TileView {
  BlockView view;
  int begin = 0, end = 0;  // keys that some query may see; empty: none
  bool all = true;         // every query sees every key, up to mask and bias
  int num_vecs = 0;
};

inline TileView view_block(const HeadOptions& head, const QueryTile& tile, int64_t first_key, int num_keys) {
  const TileRanges& ranges = tile.ranges;
  ViewScratch& scratch = *head.view_scratch;
  TileView t;
  t.begin = clamp_to_block(ranges.any_begin, first_key, kBlock);
  t.end = clamp_to_block(ranges.any_end, first_key, num_keys);
  if (t.begin >= t.end) return t;
  t.num_vecs = (tile.num_queries + kLanes - 1) / kLanes;
  if (head.additive.given()) {
    const Seen seen =
        additive_tile(scratch.additive, head.additive, tile.first_query, tile.num_queries, first_key, t.begin, t.end);
    if (seen == Seen::kNone) {
      t.end = t.begin;
      return t;
    }
    if (seen == Seen::kSome) {
      t.view.additive = scratch.additive;
      t.view.additive_shared = head.additive.same_for_all_queries();
    }
  }
  if (head.problem.slopes != nullptr) {
    // In double: an offset may be any int64.
    const double first = static_cast<double>(head.sequence.offset) + static_cast<double>(tile.first_query - first_key);
    for (int q = 0; q < kTile; ++q) scratch.diagonal[q] = static_cast<float>(first + q);
    t.view.diagonal = scratch.diagonal;
  }
  if (head.problem.dropout.scale != 1.0f) {
    const int64_t head_index = head.b * head.problem.num_heads + head.h;
    dropout_tile(scratch.kept, head.problem.dropout, static_cast<uint32_t>(head_index), tile.first_query, first_key,
                 t.begin, t.end, t.num_vecs);
    t.view.kept = scratch.kept;
  }
  t.all = ranges.all_begin <= first_key && ranges.all_end >= first_key + num_keys && num_keys % kMicroRows == 0;
  if (t.all) {
    t.begin = 0;
    t.end = num_keys;
  } else {
    block_ranges(scratch.ranges, ranges, first_key, kBlock);
    t.view.ranges = &scratch.ranges;
  }
  return t;
}

inline Part part_of_group(const TileView& t, int group) {
  const BlockRanges& ranges = *t.view.ranges;
  Part part{group, group + kGroup, t.num_vecs, 0, group >= ranges.all_begin && group + kGroup <= ranges.all_end};
  if (part.begin < t.begin) part.begin = t.begin / kMicroRows * kMicroRows;
  if (part.end > t.end) part.end = (t.end + kMicroRows - 1) / kMicroRows * kMicroRows;
  for (int v = 0; v < t.num_vecs; ++v) {
    if (ranges.vec_begin[v] >= part.end || ranges.vec_end[v] <= part.begin) continue;
    if (v < part.v_begin) part.v_begin = v;
    part.v_end = v + 1;
  }
  return part;
}

// Calls work(part, view) for all that the tile sees of a block, keys in order.
template <class Work>
void for_each_part(const TileView& t, const Work& work) {
  if (t.all) return work(Part{t.begin, t.end, 0, t.num_vecs}, t.view);
  BlockView view_all = t.view;
  view_all.ranges = nullptr;
  const auto finish = [&](const Part& part) {
    if (part.v_begin < part.v_end) work(part, part.all ? view_all : t.view);
  };
  Part open;
  for (int group = t.begin / kGroup * kGroup; group < t.end; group += kGroup) {
    const Part part = part_of_group(t, group);
    if (part.continues(open)) {
      open.end = part.end;
      continue;
    }
    finish(open);
    open = part;
  }
  finish(open);
}

// X^T [keys][queries] = rows A^T for the keys and vectors of a part: calls take(x, key, lane) with each microkernel's
// sums, x[r][v] being key + r and the queries lane + v * kLanes on. A^T [words][kTile] is a tile of queries.
template <class Mac, int kVecs_, class Take>
inline void products_of_vecs(const float* a, int64_t words, const Words& rows, int begin, int end, int lane,
                             const Take& take) {
  constexpr int kRows = micro_rows(kVecs_);
  int k = begin;
  for (; k + kRows <= end; k += kRows) {
    F x[kRows][kVecs_];
    clear(x);
    contract<Mac, true>(x, a + lane, kTile, rows.data + k * rows.stride, rows.stride, words);
    take(x, k, lane);
  }
  if constexpr (kRows != kMicroRows) {
    for (; k < end; k += kMicroRows) {
      F x[kMicroRows][kVecs_];
      clear(x);
      contract<Mac, true>(x, a + lane, kTile, rows.data + k * rows.stride, rows.stride, words);
      take(x, k, lane);
    }
  }
}

template <class Mac, class Take>
void for_each_product(const float* a, int64_t words, const Words& rows, const Part& part, const Take& take) {
  for (int v = part.v_begin; v < part.v_end; v += kMicroVecs) {
    const int lane = v * kLanes, begin = part.begin, end = part.end;
    constexpr bool kWide = kMicroVecs == 4;
    switch (part.v_end - v < kMicroVecs ? part.v_end - v : kMicroVecs) {
      case 1: products_of_vecs<Mac, 1>(a, words, rows, begin, end, lane, take); break;
      case 2: products_of_vecs<Mac, 2>(a, words, rows, begin, end, lane, take); break;
      case 3: products_of_vecs<Mac, kWide ? 3 : 1>(a, words, rows, begin, end, lane, take); break;
      default: products_of_vecs<Mac, kWide ? 4 : 1>(a, words, rows, begin, end, lane, take); break;
    }
  }
}

// Which of the kLanes queries from lane `at` on see a key.
inline M seen(const BlockView& view, int key, int at) {
  M m = mask_from_bits(~0u);
  if (view.ranges != nullptr) {
    const I index = broadcast_int(key);
    m = both(less_int(index, load_int(view.ranges->end + at)),
             negate(less_int(index, load_int(view.ranges->begin + at))));
  }
  if (view.additive != nullptr) {
    const F add = view.additive_shared ? broadcast(view.additive[key]) : load(view.additive + key * kTile + at);
    m = both(m, negate(equal(add, broadcast(-kInfinity))));
  }
  return m;
}

inline bool hidden(const BlockView& view, int key, int query) {
  if (view.ranges != nullptr && (key < view.ranges->begin[query] || key >= view.ranges->end[query])) return true;
  return view.additive != nullptr && view.additive[view.additive_shared ? key : key * kTile + query] == -kInfinity;
}

// Of a row with l = 0: whether mask and bias leave it a key, so that all it sees has score -inf: exp(-inf + inf), NaN.
inline bool sees_only_minus_infinity(const HeadOptions& head, const QueryTile& tile, int query) {
  return leaves_a_key(head.additive, {tile.ranges.begin[query], tile.ranges.end[query]}, tile.first_query + query);
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
