// What a tile of queries sees of a block of keys: ranges from causal, window and lengths; mask and bias as one additive
// tile in which -inf means hidden.
#pragma once

#include "cpu/attention/problem.h"
#include "cpu/isa/elementary.h"
#include "cpu/isa/elements.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Key ranges of the queries of a tile; queries that are not there see all keys and are never stored.
struct TileRanges {
  int64_t begin[kTile], end[kTile];
  int64_t any_begin, any_end;  // some query sees a key in here, none outside
  int64_t all_begin, all_end;  // every query sees every key in here
};

inline TileRanges tile_ranges(const Band& band, const Sequence& s, int64_t first_query, int num_queries) {
  TileRanges r;
  r.any_begin = s.len_k;
  r.any_end = 0;
  r.all_begin = 0;
  r.all_end = s.len_k;
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
    r.end[q] = range.end > range.begin ? range.end : range.begin;
    if (q >= num_queries) continue;
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
};

inline int clamp_to_block(int64_t key, int64_t first, int block) {
  return key <= first ? 0 : key - first >= block ? block : static_cast<int>(key - first);
}

inline void block_ranges(BlockRanges& r, const TileRanges& tile, int64_t first, int block) {
  r.all_begin = clamp_to_block(tile.all_begin, first, block);
  r.all_end = clamp_to_block(tile.all_end, first, block);
  for (int v = 0; v < kVecs; ++v) {
    int low = block, high = 0;
    for (int q = v * kLanes; q < (v + 1) * kLanes; ++q) {
      r.begin[q] = clamp_to_block(tile.begin[q], first, block);
      r.end[q] = clamp_to_block(tile.end[q], first, block);
      if (r.end[q] <= r.begin[q]) continue;
      if (r.begin[q] < low) low = r.begin[q];
      if (r.end[q] > high) high = r.end[q];
    }
    r.vec_begin[v] = low;
    r.vec_end[v] = high;
  }
}

// Mask and bias of one head, seen from a sequence's first query.
struct Additive {
  Broadcast mask, bias;  // data moved to the head
  bool given() const { return mask.data != nullptr || bias.data != nullptr; }
  bool same_for_all_queries() const { return mask.stride_q == 0 && bias.stride_q == 0; }
};

inline Broadcast at_head(const Broadcast& x, int64_t b, int64_t h) {
  Broadcast head = x;
  if (x.data == nullptr) return head;
  head.data = static_cast<const char*>(x.data) + (b * x.stride_b + h * x.stride_h) * element_bytes(x.dtype);
  return head;
}

inline Additive additive(const Problem& problem, int64_t b, int64_t h) {
  return {at_head(problem.mask, b, h), at_head(problem.bias, b, h)};
}

// Bias of n keys for query i, with -inf where the mask hides.
inline F additive_row(const Additive& x, int64_t i, int64_t key, int n) {
  F row = broadcast(0.0f);
  if (x.bias.data != nullptr) {
    row = load_elements(x.bias.data, x.bias.dtype, i * x.bias.stride_q + key * x.bias.stride_k, x.bias.stride_k, n);
  }
  if (x.mask.data == nullptr) return row;
  const uint8_t* mask = static_cast<const uint8_t*>(x.mask.data) + i * x.mask.stride_q + key * x.mask.stride_k;
  F keep;
  if (n == kLanes && x.mask.stride_k == 1) {
    keep = load_bool(mask);
  } else {
    uint8_t buffer[kLanes] = {};
    for (int k = 0; k < n; ++k) buffer[k] = mask[k * x.mask.stride_k];
    keep = load_bool(buffer);
  }
  return select(equal(keep, broadcast(0.0f)), broadcast(-kInfinity), row);
}

enum class Seen { kNone, kSome, kAllPlain };  // kAllPlain: nothing is hidden and nothing added

struct SeenBits {
  uint32_t visible = 0, changed = 0;
  void add(F x, int n) {
    const uint32_t first = n == 32 ? ~0u : (1u << n) - 1;
    visible |= ~bits(equal(x, broadcast(-kInfinity))) & first;
    changed |= ~bits(equal(x, broadcast(0.0f))) & first;
  }
  Seen seen() const { return visible == 0 ? Seen::kNone : changed == 0 ? Seen::kAllPlain : Seen::kSome; }
};

// Whether mask and bias leave query i a key of its range.
inline bool leaves_a_key(const Additive& x, const KeyRange& range, int64_t i) {
  for (int64_t k = range.begin; k < range.end; k += kLanes) {
    const int n = range.end - k < kLanes ? static_cast<int>(range.end - k) : kLanes;
    SeenBits seen;
    seen.add(additive_row(x, i, k, n), n);
    if (seen.seen() != Seen::kNone) return true;
  }
  return false;
}

// Fills tile[key][query] for keys [begin, end) of the block that starts at `first`; if all queries share one row,
// tile[key] alone.
inline Seen additive_tile(float* tile, const Additive& x, int64_t first_query, int num_queries, int64_t first,
                          int begin, int end) {
  SeenBits seen;
  if (x.same_for_all_queries()) {
    for (int k = begin; k < end; k += kLanes) {
      const int n = end - k < kLanes ? end - k : kLanes;
      const F row = additive_row(x, first_query, first + k, n);
      seen.add(row, n);
      store_first(tile + k, row, n);
    }
    return seen.seen();
  }
  for (int q = 0; q < num_queries; q += kLanes) {
    for (int k = begin; k < end; k += kLanes) {
      const int n = end - k < kLanes ? end - k : kLanes;
      F block[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        if (q + r >= num_queries) {
          block[r] = broadcast(0.0f);
          continue;
        }
        block[r] = additive_row(x, first_query + q + r, first + k, n);
        seen.add(block[r], n);
      }
      transpose(block);
      for (int i = 0; i < n; ++i) store(tile + (k + i) * kTile + q, block[i]);
    }
  }
  return seen.seen();
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
