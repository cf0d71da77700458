// Softmax of one query row over a chunk of keys, keys along the lanes: raw scores in memory become weights.
#pragma once

#include "cpu/attention/softmax.h"
#include "cpu/isa/dropout.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kDecodeBlock = 16;  // keys; a chunk's blocks are the bits of a word
static_assert(kDecodeChunk == 32 * kDecodeBlock && kDecodeBlock % kLanes == 0);

// A query row, and the chunk of keys it looks at. Positions count from the chunk's first key.
struct DecodeRow {
  int64_t h, i;    // head and query
  int begin, end;  // keys that causal, window and lengths let it see
};

// A chunk as all its rows see it.
struct DecodeChunk {
  int64_t first;    // key
  int num_keys;     // of the sequence
  uint32_t blocks;  // bit n: some row may see a key of block n
  bool all;         // every row sees every key
};

// Visits the chunk's blocks that are seen, in order: visit(first key, number of keys).
template <class Visit>
inline void for_each_block(const DecodeChunk& chunk, const Visit& visit) {
  for (uint32_t left = chunk.blocks; left != 0; left &= left - 1) {
    const int key = __builtin_ctz(left) * kDecodeBlock;
    visit(key, chunk.num_keys - key < kDecodeBlock ? chunk.num_keys - key : kDecodeBlock);
  }
}

// Bits of the blocks in which mask and bias leave query i a key.
inline uint32_t blocks_left(const Additive& additive, int64_t i, const DecodeChunk& chunk) {
  uint32_t blocks = 0;
  for_each_block(chunk, [&](int key, int n) {
    SeenBits seen;
    for (int k = 0; k < n; k += kLanes) {
      const int lanes = n - k < kLanes ? n - k : kLanes;
      seen.add(additive_row(additive, i, chunk.first + key + k, lanes), lanes);
    }
    if (seen.seen() != Seen::kNone) blocks |= 1u << (key / kDecodeBlock);
  });
  return blocks;
}

// kept[n]: bit k tells whether dropout keeps key 8 n + k of the chunk, for the keys [begin, end).
inline void dropout_row(uint8_t (&kept)[kDecodeChunk / 8], const Dropout& dropout, uint32_t head_index, int64_t i,
                        const DecodeChunk& chunk, int begin, int end) {
  for (int group = begin / 8; group * 8 < end; group += kLanes) {
    const I counter = add_int(broadcast_int(static_cast<int32_t>(chunk.first / 8 + group)), iota());
    const PhiloxWords random =
        philox({{broadcast_int(static_cast<int32_t>(head_index)), broadcast_int(static_cast<int32_t>(i)), counter,
                 broadcast_int(static_cast<int32_t>(dropout.offset))}},
               dropout.seed);
    const I threshold = broadcast_int(static_cast<int32_t>(dropout.threshold));
    uint32_t lanes_kept[8];  // [key of a group], a bit for each group
    for (int w = 0; w < 4; ++w) {
      lanes_kept[2 * w] = ~bits(less_int(and_int(random.word[w], broadcast_int(0xffff)), threshold));
      lanes_kept[2 * w + 1] = ~bits(less_int(shift_right<16>(random.word[w]), threshold));
    }
    for (int lane = 0; lane < kLanes && group + lane < kDecodeChunk / 8; ++lane) {
      uint32_t byte = 0;
      for (int k = 0; k < 8; ++k) byte |= (lanes_kept[k] >> lane & 1) << k;
      kept[group + lane] = static_cast<uint8_t>(byte);
    }
  }
}

// Which of kLanes keys from `key` on are kept.
inline M kept_keys(const uint8_t (&kept)[kDecodeChunk / 8], int key) {
  uint32_t keys = kept[key / 8];
  if constexpr (kLanes == 16) keys |= static_cast<uint32_t>(kept[key / 8 + 1]) << 8;
  return mask_from_bits(keys >> (key % 8));
}

// What a row needs to turn scores into weights.
struct RowSoftmax {
  const DecodeRow& row;
  const DecodeChunk& chunk;
  const ScoreRule& rule;
  const Additive& additive;
  const float diagonal;  // ALiBi: position of the query, from the chunk's first key
};

// kLanes scores from `key` on, of which some may be hidden or changed.
inline F ruled_score(const RowSoftmax& x, F s, int key) {
  const int left = x.chunk.num_keys - key;
  if (left <= 0) return broadcast(-kInfinity);
  const I index = add_int(broadcast_int(key), iota());
  if (x.rule.natural) {
    s = s * broadcast(x.rule.scale);
    if (x.rule.softcap > 0) s = broadcast(x.rule.softcap) * tanh(s / broadcast(x.rule.softcap));
    if (x.rule.slope != 0) {
      s = s - broadcast(x.rule.slope) * absolute(broadcast(x.diagonal) - to_float(index));
    }
    if (x.additive.given()) {
      const F add = additive_row(x.additive, x.row.i, x.chunk.first + key, left < kLanes ? left : kLanes);
      s = select(equal(add, broadcast(-kInfinity)), add, s + add);
    }
  }
  const M seen = both(less_int(index, broadcast_int(x.row.end)), negate(less_int(index, broadcast_int(x.row.begin))));
  return select(seen, s, broadcast(-kInfinity));
}

// The larger lane of all; NaN loses.
inline float largest_lane(F x) {
  alignas(64) float lanes[kLanes];
  store(lanes, x);
  float top = lanes[0];
  for (int i = 1; i < kLanes; ++i) top = lanes[i] > top ? lanes[i] : top;
  return top;
}

inline float lane_sum(F x) {
  alignas(64) float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// Scores -> weights exp(S - m) after dropout, in all blocks of the chunk that are seen; m is the row's largest score here
// (kNoMaximum if none is above -inf) and l the sum of its undropped weights.
inline void softmax_row(float* scores, const RowSoftmax& x, const uint8_t (*kept)[kDecodeChunk / 8], float* m,
                        float* l) {
  const bool plain = !x.rule.natural && x.chunk.all;
  F top = broadcast(kNoMaximum);
  for_each_block(x.chunk, [&](int key, int n) {
    const bool untouched = plain && n == kDecodeBlock;
#pragma GCC unroll 4
    for (int k = key; k < key + kDecodeBlock; k += kLanes) {
      F s = load(scores + k);
      if (!untouched) {
        s = ruled_score(x, s, k);
        store(scores + k, s);
      }
      top = maximum(s, top);
    }
  });
  *m = largest_lane(top);
  const F largest = broadcast(*m), factor = broadcast(x.rule.factor);
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

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
