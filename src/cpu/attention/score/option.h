// What an option of the scores may say, and where a vector of scores stands when it is asked.
#pragma once

#include "cpu/attention/problem.h"
#include "cpu/isa/elementary.h"
#include "cpu/isa/tile.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Tiles: key `key` of the block that starts at first_key, queries first_query + lane + (0 .. kLanes - 1).
struct TilePlace {
  int64_t first_query, first_key;
  int key, lane;
  I queries() const { return add_int(broadcast_int(static_cast<int32_t>(first_query + lane)), iota()); }
  I keys() const { return broadcast_int(static_cast<int32_t>(first_key + key)); }
};

// Decoding: one query, keys first_key + key + (0 .. kLanes - 1), of which the first n are there.
struct RowPlace {
  int64_t query, first_key;
  int key, n;
  const uint16_t* shown = nullptr;  // by a program, of keys from first_key on: a bit each; null: it is asked
  I queries() const { return broadcast_int(static_cast<int32_t>(query)); }
  I keys() const { return add_int(broadcast_int(static_cast<int32_t>(first_key + key)), iota()); }
};

// Tiny heads: one query and one key of kLanes heads.
struct HeadsPlace {
  int query, key;
  I queries() const { return broadcast_int(query); }
  I keys() const { return broadcast_int(key); }
};

struct Queries {
  int64_t first;
  int count;
};

// Keys [first + begin, first + end).
struct Keys {
  int64_t first;
  int begin, end;
  bool narrow = false;  // Option::look may leave some out
};

// What is known of a call when memory is taken for it.
struct Asked {
  bool additive;  // a bias
  bool softcap, gradients;
};

// What an option keeps of a score for its gradient: nothing, or a number.
struct KeepsNothing {
  static constexpr bool kNumber = false;
};
struct KeepsNumber {
  static constexpr bool kNumber = true;
  F number;
};

// An option that does nothing. An option derives from it, is constructed for one head from (problem, sequence, b, h), and
// hides what it changes; options.h lists it. All is inlined: what is asked of each score must be a few operations, and what
// an option that is off costs, a branch that goes one way throughout a task. The path of tiny heads asks score and
// raw_gradient alone: tiny_takes must refuse what hides keys, or is not the same for all heads.
struct Option {
  // What look finds out about a tile and a block of keys, or look_row about a row; and the memory that it needs for it.
  struct View {};
  struct Memory {};
  using Kept = KeepsNothing;
  static constexpr bool kHides = false;  // sees may be less than what it is given

  bool on() const { return false; }             // changes scores: products are scaled before the first option sees them
  bool may_hide() const { return false; }       // keys that causal, windows and lengths show
  bool same_for_heads() const { return true; }  // in what it hides
  bool same_for_queries() const { return true; }  // likewise

  // Whether some of the queries may see some of the keys: asked of blocks of keys, one or many, before these are read. `look`
  // must say no to what this excludes.
  bool may_see(const Queries&, const KeyRange&) const { return true; }

  // Adds to RowsAhead what `look` will read of the queries and keys.
  void add_ahead(auto& /*ahead*/, const Queries&, const KeyRange&) const {}

  // Floats beside what Memory holds: the most that take_memory takes.
  static int64_t memory_floats(const Asked&) { return 0; }
  void take_memory(auto& /*own*/, float*& /*memory*/, bool /*gradients*/) const {}

  // Before a tile looks at keys of a block, and whether it sees any of them. Where keys.narrow says so, it may leave out
  // first and last ones of which it sees none, from a multiple of kNarrow on by multiples of it.
  bool look(auto& /*view*/, auto& /*memory*/, const Queries&, Keys&) const { return true; }
  void look_row(auto& /*view*/, int64_t /*query*/, int64_t /*first_key*/) const {}
  bool hides(const auto& /*view*/) const { return false; }  // whether some key may be hidden, now that it has looked

  // The keys that are seen, of those in `seen`.
  M sees(M seen, const auto& /*place*/, const auto& /*view*/) const { return seen; }

  // The score after this option: -inf where it hides. What an option before it hid stays hidden, whatever comes out.
  // `kept` is what raw_gradient will be given of the same score.
  F score(F s, const auto& /*place*/, const auto& /*view*/, auto& /*kept*/) const { return s; }

  // From the gradient of what `score` gave, that of what it was given. What keeps a number: in backward it stands in
  // kept_tile(memory), [key][query] of the block at hand.
  F raw_gradient(F ds, const auto& /*place*/, const auto& /*view*/, const auto& /*kept*/) const { return ds; }
};

// Products of a piece of a tile, times `scale`, -> scores, which stay in registers, by change(x, r, v). What an option that is
// often alone offers: apply(s, scale, view, key, lane), s[r][v] being key + r and the queries lane + v * kLanes on.
template <int kRows, int kVecs_, class Change>
__attribute__((always_inline)) inline void for_each_product_of(F (&s)[kRows][kVecs_], float scale,
                                                               const Change& change) {
#pragma GCC unroll 8
  for (int v = 0; v < kVecs_; ++v) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) s[r][v] = change(s[r][v] * broadcast(scale), r, v);
  }
}

constexpr int kBlock = 128;                               // keys
constexpr int kNarrow = kPartKeys > 16 ? kPartKeys : 16;  // keys of which for_each_micro takes whole groups
constexpr int kTileFloats = kBlock * kTile;

inline float* take(float*& memory, int64_t floats) {
  float* taken = memory;
  memory += floats;
  return taken;
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
