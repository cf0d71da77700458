// Which probabilities dropout keeps: of a tile of queries and a block of keys, and of one query and a chunk of keys.
#pragma once

#include "cpu/attention/functions.h"
#include "cpu/attention/score/option.h"
#include "cpu/isa/philox.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// The counters of a head, a query and eight keys, as all lanes have them.
inline I head_counter(const Dropout& dropout, uint32_t head_index) {
  const uint32_t counted = dropout.first_head + head_index + head_index / dropout.num_heads * dropout.other_heads;
  return broadcast_int(static_cast<int32_t>(counted));
}
inline I query_counter(const Dropout& dropout, int64_t i) {
  return broadcast_int(static_cast<int32_t>(dropout.first_query + static_cast<uint32_t>(i)));
}
inline I key_counter(const Dropout& dropout, int64_t first_key) {
  return broadcast_int(static_cast<int32_t>(dropout.first_key_group + static_cast<uint32_t>(first_key / 8)));
}

// Bit q of kept[key][v]: query v * kLanes + q keeps key; for the keys [begin, end), widened to multiples of 8, of the
// block that starts at key `first` (a multiple of 8), and the vectors [0, num_vecs).
inline void dropout_tile(uint16_t (&kept)[kBlock][kVecs], const Dropout& dropout, uint32_t head_index,
                         int64_t first_query, int64_t first, int begin, int end, int num_vecs) {
  const I threshold = broadcast_int(static_cast<int32_t>(dropout.threshold));
  const I head = head_counter(dropout, head_index);
  for (int v = 0; v < num_vecs; ++v) {
    const I query = add_int(query_counter(dropout, first_query + v * kLanes), iota());
    for (int k = begin & ~7; k < end; k += 8) {
      const PhiloxWords random =
          philox({{head, query, key_counter(dropout, first + k), broadcast_int(static_cast<int32_t>(dropout.offset))}},
                 dropout.seed);
      for (int w = 0; w < 4; ++w) {
        const M low = negate(less_int(and_int(random.word[w], broadcast_int(0xffff)), threshold));
        const M high = negate(less_int(shift_right<16>(random.word[w]), threshold));
        kept[k + 2 * w][v] = static_cast<uint16_t>(bits(low));
        kept[k + 2 * w + 1][v] = static_cast<uint16_t>(bits(high));
      }
    }
  }
}

// kept[n]: bit k tells whether dropout keeps key 8 n + k of the chunk, for the keys [begin, end).
inline void dropout_row(uint8_t (&kept)[kDecodeChunk / 8], const Dropout& dropout, uint32_t head_index, int64_t i,
                        int64_t first_key, int begin, int end) {
  for (int group = begin / 8; group * 8 < end; group += kLanes) {
    const I counter = add_int(key_counter(dropout, first_key + group * 8), iota());
    const PhiloxWords random = philox({{head_counter(dropout, head_index), query_counter(dropout, i), counter,
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

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
