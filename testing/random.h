// Random numbers that are the same everywhere, for operands and problems.
#pragma once

#include <cstdint>

namespace polyhead::testing {

// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
class Random {
 public:
  // Streams of one seed are independent: one for each operand.
  explicit Random(uint64_t seed, uint64_t stream = 0)
      : state_(seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03) {
    bits();
  }

  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }

  // 0 <= below(count) < count; count >= 1.
  int64_t below(int64_t count) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(count)); }

  int64_t integer(int64_t first, int64_t last) { return first + below(last - first + 1); }  // both ends included

  // [0, 1)
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

  bool chance(double p) { return uniform() < p; }

  // Mean 0, variance 1, within +-3.47: the sum of four uniform numbers, cheap enough for gigabytes.
  double normal() {
    const uint64_t all = bits();
    const auto sum = static_cast<double>((all & 0xffff) + (all >> 16 & 0xffff) + (all >> 32 & 0xffff) + (all >> 48));
    return (sum - 2 * 65535.0) * (1.7320508075688772 / 65536);
  }

 private:
  uint64_t state_;
};

// Streams of a problem's seed.
namespace streams {
enum Stream : uint64_t {
  kQueryData = 1,
  kKeyData,
  kValueData,
  kMask,
  kBias,
  kSlopes,
  kOffsets,
  kLengthsQ,
  kLengthsK,
  kWindows,
  kDropout,
  kLayouts,
  kGradOutData,
  kGradLogsumexpData,
  kGradientsData,  // and one for each of kGradients
  kPages = 24,
  kFormats = 25,
  kSinkKeys = 26,
  kMaskAtEnd = 27,
  kSinks = 31,
  kResidualData = 32,  // of layers
  kWeightsData = 48,   // and one for each WeightKind
  kCapturesData = 96,  // and one for each tensor of a program
  kGradCapturesData = 112,
  kNormalizer = 30,
  kProgram = 128,
};
}  // namespace streams

}  // namespace polyhead::testing
