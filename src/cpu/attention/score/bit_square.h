// 64 x 64 bits, such as a boolean mask of 64 queries and 64 keys.
#pragma once

#include "cpu/isa/simd.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kBits = 64;

// Bits [begin, end), as far as there are any.
inline uint64_t bits_between(int begin, int end) {
  if (begin < 0) begin = 0;
  if (end > kBits) end = kBits;
  if (begin >= end) return 0;
  return (~uint64_t{0} >> (kBits - (end - begin))) << begin;
}

// Each square of kWidth x kWidth bits changes places with that on the other side of the diagonal of its 2 kWidth x 2 kWidth.
template <int kWidth>
inline void exchange_squares(uint64_t (&rows)[kBits]) {
  constexpr uint64_t kFirst = ~uint64_t{0} / ((uint64_t{1} << kWidth) + 1);  // the first of each two squares of a row
  for (int square = 0; square < kBits; square += 2 * kWidth) {
    for (int i = square; i < square + kWidth; ++i) {
      const uint64_t differ = (rows[i] >> kWidth ^ rows[i + kWidth]) & kFirst;
      rows[i] ^= differ << kWidth;
      rows[i + kWidth] ^= differ;
    }
  }
}

// Bit j of row i <-> bit i of row j.
inline void transpose_bits(uint64_t (&rows)[kBits]) {
  exchange_squares<32>(rows);
  exchange_squares<16>(rows);
  exchange_squares<8>(rows);
  exchange_squares<4>(rows);
  exchange_squares<2>(rows);
  exchange_squares<1>(rows);
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
