// Which keys causal, windows and lengths let the queries of a tile see: one interval for each query, and the first keys.
#pragma once

#include "cpu/attention/problem.h"
#include "cpu/isa/tile.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Key ranges of the queries of a tile; queries that are not there see all keys and are never stored.
struct TileRanges {
  int64_t begin[kTile], end[kTile];
  int64_t any_begin, any_end;  // some query sees a key in here, beside the sinks none outside
  int64_t all_begin, all_end;  // every query sees every key in here
  int64_t sinks;               // keys [0, sinks) are seen by queries whose `end` they stand before

  // No query sees a key outside of [first, last).
  int64_t first() const { return sinks > 0 ? 0 : any_begin; }
  int64_t last() const { return sinks > any_end ? sinks : any_end; }
};

inline TileRanges tile_ranges(const Band& band, const Sequence& s, int64_t first_query, int num_queries) {
  TileRanges r;
  r.any_begin = s.len_k;
  r.any_end = 0;
  r.all_begin = 0;
  r.all_end = s.len_k;
  r.sinks = 0;
  if (is_open(band)) {
    r.any_begin = 0;
    r.any_end = s.len_k;
    for (int q = 0; q < kTile; ++q) {
      r.begin[q] = 0;
      r.end[q] = q < num_queries ? s.len_k : 0;
    }
    return r;
  }
  for (int q = 0; q < kTile; ++q) {
    const KeyRange range = q < num_queries ? key_range(band, s, first_query + q) : KeyRange{0, 0};
    r.begin[q] = range.begin;
    r.end[q] = range.end;
    if (q >= num_queries) continue;
    if (sinks_end(band, range) > r.sinks) r.sinks = sinks_end(band, range);
    if (range.begin > r.all_begin) r.all_begin = range.begin;
    if (range.end < r.all_end) r.all_end = range.end;
    if (range.end <= range.begin) continue;
    if (range.begin < r.any_begin) r.any_begin = range.begin;
    if (range.end > r.any_end) r.any_end = range.end;
  }
  return r;
}

// The same ranges relative to a block that starts at key `first` and has kBlock keys.
struct BlockRanges {
  alignas(64) int32_t begin[kTile], end[kTile];
  int vec_begin[kVecs], vec_end[kVecs];  // keys that some query of the vector sees
  int all_begin, all_end;                // keys that every query sees
  int sinks;
};

inline int clamp_to_block(int64_t key, int64_t first, int block) {
  return key <= first ? 0 : key - first >= block ? block : static_cast<int>(key - first);
}

inline void block_ranges(BlockRanges& r, const TileRanges& tile, int64_t first, int block) {
  r.all_begin = clamp_to_block(tile.all_begin, first, block);
  r.all_end = clamp_to_block(tile.all_end, first, block);
  r.sinks = clamp_to_block(tile.sinks, first, block);
  for (int v = 0; v < kVecs; ++v) {
    int low = block, high = 0;
    for (int q = v * kLanes; q < (v + 1) * kLanes; ++q) {
      r.begin[q] = clamp_to_block(tile.begin[q], first, block);
      r.end[q] = clamp_to_block(tile.end[q], first, block);
      const int sinks = r.sinks < r.end[q] ? r.sinks : r.end[q];
      if (sinks > 0) low = 0;
      if (sinks > high) high = sinks;
      if (r.end[q] <= r.begin[q]) continue;
      if (r.begin[q] < low) low = r.begin[q];
      if (r.end[q] > high) high = r.end[q];
    }
    r.vec_begin[v] = low;
    r.vec_end[v] = high;
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
