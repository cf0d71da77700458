// Weights of one query row over a chunk of keys, keys along the lanes: raw scores in memory become those of a softmax, or
// the weights themselves.
#pragma once

#include "cpu/attention/decode_rows.h"
#include "cpu/attention/score/dropout.h"
#include "cpu/attention/softmax.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// A query row, and the chunk of keys it looks at. Positions count from the chunk's first key.
struct DecodeRow {
  int64_t h, i;                     // head and query
  int begin, end;                   // keys that causal, window and lengths let it see, beside
  int sinks;                        // [0, sinks)
  const uint16_t* shown = nullptr;  // by a program, a bit of each key; null: there is none
};

// A chunk as all its rows see it.
struct DecodeChunk {
  int64_t first;    // key
  int num_keys;     // of the sequence
  uint32_t blocks;  // bit n: some row may see a key of block n
  bool all;         // every row sees every key

  bool has_block(int key) const { return (blocks >> (key / kDecodeBlock) & 1) != 0; }
  int first_block() const { return __builtin_ctz(blocks) * kDecodeBlock; }  // its first key
};

// Visits rows [begin, end) that are queries of one head, one after the other.
template <class Visit>
inline void for_each_head(const DecodeRow* rows, int num_rows, const Visit& visit) {
  for (int begin = 0, end; begin < num_rows; begin = end) {
    for (end = begin + 1; end < num_rows && rows[end].h == rows[begin].h;) ++end;
    visit(begin, end);
  }
}

// Visits the chunk's blocks that are seen, in order: visit(first key, number of keys).
template <class Visit>
inline void for_each_block(const DecodeChunk& chunk, const Visit& visit) {
  for (uint32_t left = chunk.blocks; left != 0; left &= left - 1) {
    const int key = __builtin_ctz(left) * kDecodeBlock;
    visit(key, chunk.num_keys - key < kDecodeBlock ? chunk.num_keys - key : kDecodeBlock);
  }
}

// The same blocks, those that follow each other at once.
template <class Visit>
inline void for_each_run(const DecodeChunk& chunk, const Visit& visit) {
  for (uint32_t left = chunk.blocks; left != 0;) {
    const int first = __builtin_ctz(left), end = first + __builtin_ctzll(~(uint64_t{left} >> first));
    const int key = first * kDecodeBlock, last = end * kDecodeBlock;
    visit(key, (last < chunk.num_keys ? last : chunk.num_keys) - key);
    left = end < 32 ? left & (~0u << end) : 0;
  }
}

// A row as its options see it.
struct RowScore {
  const Score& score;  // of its head
  const DecodeRow& row;
  const DecodeChunk& chunk;
  Options::View view;

  RowScore(const Score& of_head, const DecodeRow& decode_row, const DecodeChunk& decode_chunk)
      : score(of_head), row(decode_row), chunk(decode_chunk) {
    score.options.look_row(view, row.i, chunk.first);
  }

  RowPlace at(int key) const {
    const int left = chunk.num_keys - key;
    return {row.i, chunk.first, key, left < kLanes ? left : kLanes, row.shown};
  }

  // Which of kLanes keys from `key` on are there.
  M there(int key) const {
    const int n = at(key).n;
    return mask_from_bits(n > 0 ? (1u << n) - 1 : 0);
  }

  // Which of those options let the row see.
  M shown(int key) const {
    const RowPlace place = at(key);
    if (place.n <= 0) return mask_from_bits(0);
    return score.options.sees(there(key), place, view);
  }

  // kLanes products from `key` on -> the scores of options.
  F of_options(F products, int key) const {
    Options::Kept kept;
    return score.of(products, at(key), view, kept);
  }

  // kLanes products from `key` on, or what a program made of them -> scores, -inf where hidden.
  F scores(F products, int key) const {
    const RowPlace place = at(key);
    if (place.n <= 0) return broadcast(-kInfinity);
    M seen = in_range(key);
    if (score.by_program) seen = score.options.sees(seen, place, view);
    return select(seen, score.by_program ? products : of_options(products, key), broadcast(-kInfinity));
  }

  // The same -> weights where there is no softmax: scores, 0 where hidden.
  F weights(F products, int key) const {
    const RowPlace place = at(key);
    if (place.n <= 0) return broadcast(0.0f);
    const M seen = score.options.sees(in_range(key), place, view);
    return select(seen, score.by_program ? products : of_options(products, key), broadcast(0.0f));
  }

 private:
  M in_range(int key) const {
    const I index = add_int(broadcast_int(key), iota());
    const M before_end = less_int(index, broadcast_int(row.end)), hidden = less_int(index, broadcast_int(row.begin));
    if (key >= row.sinks) return both(before_end, negate(hidden));
    return both(before_end, either(negate(hidden), less_int(index, broadcast_int(row.sinks))));
  }
};

// Bits of the blocks in which options leave a row a key.
inline uint32_t blocks_left(const RowScore& x) {
  uint32_t blocks = 0;
  for_each_block(x.chunk, [&](int key, int) {
    bool some = false;
    for (int k = key; k < key + kDecodeBlock; k += kLanes) some = some || any(x.shown(k));
    if (some) blocks |= 1u << (key / kDecodeBlock);
  });
  return blocks;
}

// Scores -> weights exp(S - m) after dropout, in all blocks of the chunk that are seen; m is the row's largest score here
// (kNoMaximum if none is above -inf) and l the sum of its undropped weights.
inline void softmax_row(float* scores, const RowScore& x, const uint8_t (*kept)[kDecodeChunk / 8], float* m, float* l) {
  const bool plain = !x.score.scaled_first && x.chunk.all;
  F top = broadcast(kNoMaximum);
  for_each_block(x.chunk, [&](int key, int n) {
#pragma GCC unroll 4
    for (int k = key; k < key + kDecodeBlock; k += kLanes) {
      F s = load(scores + k);
      if (!plain) {
        s = x.scores(s, k);
        store(scores + k, s);
      } else if (n < kDecodeBlock) {  // the sequence ends here
        s = select(x.there(k), s, broadcast(-kInfinity));
        store(scores + k, s);
      }
      top = maximum(s, top);
    }
  });
  *m = largest_lane(top);
  const F largest = broadcast(*m), factor = broadcast(x.score.to_log2);
  F sum = broadcast(0.0f);
  for_each_block(x.chunk, [&](int key, int) {
#pragma GCC unroll 4
    for (int k = key; k < key + kDecodeBlock; k += kLanes) {
      F p = exp2(load(scores + k) - largest, factor);
      sum = sum + p;
      if (kept != nullptr) p = select(kept_keys(*kept, k), p, broadcast(0.0f));
      store(scores + k, p);
    }
  });
  *l = lane_sum(sum);
}

// Scores -> weights where there is no softmax, after dropout, likewise.
inline void weight_row(float* scores, const RowScore& x, const uint8_t (*kept)[kDecodeChunk / 8]) {
  for_each_block(x.chunk, [&](int key, int) {
    for (int k = key; k < key + kDecodeBlock; k += kLanes) {
      F p = x.weights(load(scores + k), k);
      // A product, not a selection: NaN stays NaN.
      if (kept != nullptr) p = p * select(kept_keys(*kept, k), broadcast(1.0f), broadcast(0.0f));
      store(scores + k, p);
    }
  });
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
