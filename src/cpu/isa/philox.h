// The random numbers of dropout: src/core/philox.h, kLanes counters at a time.
#pragma once

#include "cpu/isa/simd.h"

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

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
