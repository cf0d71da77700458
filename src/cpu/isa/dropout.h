// Which weights dropout keeps, for a tile of queries and a block of keys: src/core/philox.h, kLanes queries at a time.
#pragma once

#include "cpu/isa/operand.h"
#include "cpu/isa/tile.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

struct PhiloxWords {
  I word[4];
};

inline PhiloxWords philox(PhiloxWords c, uint64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  const I factor0 = broadcast_int(static_cast<int32_t>(0xD2511F53u));
  const I factor1 = broadcast_int(static_cast<int32_t>(0xCD9E8D57u));
  for (int round = 0; round < 10; ++round) {
    I high0, low0, high1, low1;
    multiply_wide(c.word[0], factor0, high0, low0);
    multiply_wide(c.word[2], factor1, high1, low1);
    c = {{xor_int(xor_int(high1, c.word[1]), broadcast_int(static_cast<int32_t>(key0))), low1,
          xor_int(xor_int(high0, c.word[3]), broadcast_int(static_cast<int32_t>(key1))), low0}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// Bit q of kept[key][v]: query v * kLanes + q keeps key; for the keys [begin, end), widened to multiples of 8, of the
// block that starts at key `first` (a multiple of 8), and the vectors [0, num_vecs).
template <int kBlock>
inline void dropout_tile(uint16_t (&kept)[kBlock][kVecs], const Dropout& dropout, uint32_t head_index,
                         int64_t first_query, int64_t first, int begin, int end, int num_vecs) {
  const I threshold = broadcast_int(static_cast<int32_t>(dropout.threshold));
  for (int v = 0; v < num_vecs; ++v) {
    const I query = add_int(broadcast_int(static_cast<int32_t>(first_query) + v * kLanes), iota());
    for (int k = begin & ~7; k < end; k += 8) {
      const PhiloxWords random = philox(
          {{broadcast_int(static_cast<int32_t>(head_index)), query,
            broadcast_int(static_cast<int32_t>((first + k) / 8)), broadcast_int(static_cast<int32_t>(dropout.offset))}},
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

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
