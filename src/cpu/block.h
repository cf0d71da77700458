// A block of keys as a tile of queries works on it: loading it, what of it is seen, and its scores.
//   Q^T [D][kTile]   K, V [kBlock][D]   S^T, P^T [kBlock][kTile]   O^T [Dv][kTile]   m, l [kTile]
#pragma once

#include "cpu/dropout.h"
#include "cpu/isa_functions.h"
#include "cpu/softmax.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kBlock = 128;     // keys
constexpr int kGroup = kLanes;  // keys of a block that share a range of vectors, where not every query sees all

struct Tile {
  TileState state;
  TileRanges ranges;
  float* query;  // Q^T, words
  int64_t first_query;
  int num_queries;
  bool some_hidden;  // in a block that was computed
};

struct Scratch {
  Tile tile[kMaxTiles];
  alignas(64) float p[kBlock * kTile];
  alignas(64) float diagonal[kTile];
  BlockRanges ranges;
  uint16_t kept[kBlock][kVecs];
  float* additive;  // [kBlock][kTile], only with a mask or bias
};

constexpr size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

// The keys and values of one block, as words that the microkernel can read: in place, or copied.
struct Block {
  int64_t first;
  int num_keys;
  const float *key, *value;
  ptrdiff_t key_stride, value_stride;
};

// One head of one sequence.
struct Head {
  const Problem& problem;
  const ForwardTask& task;
  Rows key, value;
  Additive additive;
  ScoreRule rule;
  Scratch* scratch;
  float *key_copy, *value_copy;
  bool rounded_weights;  // P is bfloat16 where it multiplies V
  bool careful;          // NaN or inf among hidden values: see add_not_finite
};

// Copying costs 1 to 2 % of a task of several tiles. Reading in place needs words of the right type, and rows that are not a
// multiple of 1 KiB apart: those fall into few sets of the L1 cache ([B, S, H, D] with 16 heads of 64 has such rows).
template <class Mac>
bool readable_in_place(const Rows& x, int64_t columns) {
  return plain_words<Mac>(x) && columns % Mac::kElements == 0 && x.stride % Mac::kElements == 0 &&
         (x.stride == columns || x.stride % 256 != 0);
}

template <class Mac>
Block load_block(const Head& head, int64_t first) {
  const Problem& problem = head.problem;
  const int64_t left = head.task.sequence.len_k - first;
  Block block{first, left < kBlock ? static_cast<int>(left) : kBlock, nullptr, nullptr, 0, 0};
  const int padded = (block.num_keys + kMicroRows - 1) / kMicroRows * kMicroRows;
  const bool whole = padded == block.num_keys;
  if (whole && readable_in_place<Mac>(head.key, problem.head_dim)) {
    block.key_stride = head.key.stride / Mac::kElements;
    block.key = f32(head.key.data) + first * block.key_stride;
  } else {
    block.key_stride = words_of(problem.head_dim, Mac::kElements);
    block.key = head.key_copy;
    copy_rows<Mac>(head.key_copy, head.key, first, block.num_keys, padded, problem.head_dim);
  }
  if (Mac::kElements == 1 && whole && !head.careful && readable_in_place<Mac>(head.value, problem.head_dim_v)) {
    block.value_stride = head.value.stride;
    block.value = f32(head.value.data) + first * block.value_stride;
  } else {
    block.value_stride = problem.head_dim_v;
    block.value = head.value_copy;
    copy_values<Mac>(head.value_copy, head.value, first, block.num_keys, padded, problem.head_dim_v, head.careful);
  }
  return block;
}

// Keys [begin, end), multiples of kMicroRows, as the vectors [v_begin, v_end) see them; the other vectors see none.
struct Part {
  int begin = 0, end = 0, v_begin = 0, v_end = 0;
  bool all = true;  // every query sees every key, up to mask and bias

  bool continues(const Part& before) const {
    return begin == before.end && v_begin == before.v_begin && v_end == before.v_end && all == before.all;
  }
};

// S^T = K Q^T for keys [begin, end) and one microkernel's vectors, then P^T in words of PMac.
template <class Mac, class PMac, int kVecs_>
void score_vecs(const Head& head, Tile& tile, const Block& block, const BlockView& view, int begin, int end, int lane) {
  const int64_t words = words_of(head.problem.head_dim, Mac::kElements);
  constexpr int kRows = micro_rows(kVecs_);
  int k = begin;
  for (; k + kRows <= end; k += kRows) {
    F s[kRows][kVecs_];
    clear(s);
    contract<Mac, true>(s, tile.query + lane, kTile, block.key + k * block.key_stride, block.key_stride, words);
    softmax_step<PMac>(s, head.scratch->p, tile.state, head.rule, view, k, lane, head.problem.head_dim_v);
  }
  if constexpr (kRows != kMicroRows) {
    for (; k < end; k += kMicroRows) {
      F s[kMicroRows][kVecs_];
      clear(s);
      contract<Mac, true>(s, tile.query + lane, kTile, block.key + k * block.key_stride, block.key_stride, words);
      softmax_step<PMac>(s, head.scratch->p, tile.state, head.rule, view, k, lane, head.problem.head_dim_v);
    }
  }
}

// P^T of one part, in words of PMac.
template <class Mac, class PMac>
void score_keys(const Head& head, Tile& tile, const Block& block, const BlockView& view, const Part& part) {
  for (int v = part.v_begin; v < part.v_end; v += kMicroVecs) {
    const int lane = v * kLanes, begin = part.begin, end = part.end;
    constexpr bool kWide = kMicroVecs == 4;
    switch (part.v_end - v < kMicroVecs ? part.v_end - v : kMicroVecs) {
      case 1: score_vecs<Mac, PMac, 1>(head, tile, block, view, begin, end, lane); break;
      case 2: score_vecs<Mac, PMac, 2>(head, tile, block, view, begin, end, lane); break;
      case 3: score_vecs<Mac, PMac, kWide ? 3 : 1>(head, tile, block, view, begin, end, lane); break;
      default: score_vecs<Mac, PMac, kWide ? 4 : 1>(head, tile, block, view, begin, end, lane); break;
    }
  }
}

// What a tile sees of a block, and in which parts it is computed.
struct TileView {
  BlockView view;
  int begin = 0, end = 0;  // keys that some query may see; empty: none
  bool all = true;         // every query sees every key, up to mask and bias
  int num_vecs = 0;
};

TileView view_block(const Head& head, const Tile& tile, const Block& block) {
  const TileRanges& ranges = tile.ranges;
  Scratch& scratch = *head.scratch;
  TileView t;
  t.begin = clamp_to_block(ranges.any_begin, block.first, kBlock);
  t.end = clamp_to_block(ranges.any_end, block.first, block.num_keys);
  if (t.begin >= t.end) return t;
  t.num_vecs = (tile.num_queries + kLanes - 1) / kLanes;
  if (head.additive.given()) {
    const Seen seen =
        additive_tile(scratch.additive, head.additive, tile.first_query, tile.num_queries, block.first, t.begin, t.end);
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
    const double first =
        static_cast<double>(head.task.sequence.offset) + static_cast<double>(tile.first_query - block.first);
    for (int q = 0; q < kTile; ++q) scratch.diagonal[q] = static_cast<float>(first + q);
    t.view.diagonal = scratch.diagonal;
  }
  if (head.problem.dropout.scale != 1.0f) {
    const int64_t head_index = head.task.b * head.problem.num_heads + head.task.h;
    dropout_tile(scratch.kept, head.problem.dropout, static_cast<uint32_t>(head_index), tile.first_query, block.first,
                 t.begin, t.end, t.num_vecs);
    t.view.kept = scratch.kept;
  }
  t.all = ranges.all_begin <= block.first && ranges.all_end >= block.first + block.num_keys &&
          block.num_keys % kMicroRows == 0;
  if (t.all) {
    t.begin = 0;
    t.end = block.num_keys;
  } else {
    block_ranges(scratch.ranges, ranges, block.first, kBlock);
    t.view.ranges = &scratch.ranges;
  }
  return t;
}

Part part_of_group(const TileView& t, int group) {
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

bool hidden(const BlockView& view, int key, int query) {
  if (view.ranges != nullptr && (key < view.ranges->begin[query] || key >= view.ranges->end[query])) return true;
  return view.additive != nullptr && view.additive[view.additive_shared ? key : key * kTile + query] == -kInfinity;
}

// Of a row with l = 0: whether mask and bias leave it a key, so that all it sees has score -inf: exp(-inf + inf), NaN.
bool sees_only_minus_infinity(const Head& head, const Tile& tile, int query) {
  return leaves_a_key(head.additive, {tile.ranges.begin[query], tile.ranges.end[query]}, tile.first_query + query);
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
