// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace polyhead {

// The four random words of a counter under a key.
constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key = {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
  }
  return counter;
}

// Dropout's threshold: an element is kept if its 16 bits are >= this (65536 = drop all).
constexpr uint32_t dropout_threshold(double p) { return static_cast<uint32_t>(p * 65536 + 0.5); }

// The 16 random bits of element (head_index = b * H + h, i, j).
constexpr uint32_t dropout_bits(uint64_t seed, uint32_t offset, uint32_t head_index, uint32_t i, int64_t j) {
  const auto words = philox4x32({head_index, i, static_cast<uint32_t>(j / 8), offset},
                                {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint32_t word = words[static_cast<size_t>(j % 8 / 2)];
  return j % 2 == 0 ? word & 0xffff : word >> 16;
}

}  // namespace polyhead
