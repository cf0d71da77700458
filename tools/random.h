// Random numbers that are the same everywhere, for operands and test problems.
#pragma once

#include <cstdint>

namespace polyhead::tools {

// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
class Random {
 public:
  // Streams of one seed are independent: one for each operand.
  Random(uint64_t seed, uint64_t stream) : state_(seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03) { next(); }

  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }

  // 0 <= below(count) < count; count >= 1.
  int64_t below(int64_t count) { return static_cast<int64_t>(next() % static_cast<uint64_t>(count)); }

  // [0, 1)
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

  // Mean 0, variance 1, within +-3.47: the sum of four uniform numbers, cheap enough for gigabytes.
  double normal() {
    const uint64_t bits = next();
    const auto sum =
        static_cast<double>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
    return (sum - 2 * 65535.0) * (1.7320508075688772 / 65536);
  }

 private:
  uint64_t state_;
};

}  // namespace polyhead::tools
