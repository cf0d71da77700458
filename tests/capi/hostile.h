// Hostile numbers, the values that break things, and rounds of them.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>

#include "setting.h"
#include "testing/guard.h"

namespace polyhead::testing {

class Hostile {
 public:
  explicit Hostile(uint64_t seed) : state_(seed) {}

  // splitmix64
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t first, int64_t last) { return first + below(last - first + 1); }
  bool chance(int percent) { return below(100) < percent; }

  template <class T, size_t N>
  T pick(const T (&values)[N]) {
    return values[below(N)];
  }

  int64_t hostile_integer() {
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max(), kMin = std::numeric_limits<int64_t>::min();
    constexpr int64_t kValues[] = {0,         1,         2,         3,     5,         7,         -1,        -2,
                                   -3,        kMax,      kMin,      -kMax, kMax - 1,  kMax / 2,  kMin / 2,  kMax / 8,
                                   INT32_MAX, INT32_MIN, 1LL << 31, 64,    1LL << 32, 1LL << 40, 1LL << 62, 65537};
    return chance(80) ? pick(kValues) : static_cast<int64_t>(next());
  }

  double hostile_number() {
    constexpr double kInf = std::numeric_limits<double>::infinity();
    constexpr double kValues[] = {0,     -0.0,  1,      -1,     0.5,   2,         NAN,       kInf,
                                  -kInf, 1e308, -1e308, 1e-320, 1e-30, 0.9999999, 1.0000001, 65536};
    return chance(80) ? pick(kValues) : static_cast<double>(next()) * 0x1p-63 - 1;
  }

  // Overwrites one aligned word of `bytes` bytes at `target` with a hostile integer or number.
  void spoil_word(void* target, size_t bytes) {
    const int64_t integer = hostile_integer();
    const auto half = static_cast<int32_t>(integer);
    const double number = hostile_number();
    auto* to = static_cast<uint8_t*>(target);
    switch (below(3)) {
      case 0: std::memcpy(to + 4 * below(static_cast<int64_t>(bytes / 4)), &half, 4); break;
      case 1: std::memcpy(to + 8 * below(static_cast<int64_t>(bytes / 8)), &integer, 8); break;
      case 2: std::memcpy(to + 8 * below(static_cast<int64_t>(bytes / 8)), &number, 8); break;
    }
  }

 private:
  uint64_t state_;
};

// Calls round(random) for each number of the run; stops after a few failures.
template <class Round>
void repeat(const char* program, int64_t default_runs, Round round) {
  const int64_t seed = setting("POLYHEAD_FUZZ_SEED", 1), first = setting("POLYHEAD_FUZZ_FIRST", 0);
  const int64_t runs = setting("POLYHEAD_FUZZ_RUNS", default_runs);
  std::printf("seed %lld, %lld runs\n", static_cast<long long>(seed), static_cast<long long>(runs));
  const std::string test = ::testing::UnitTest::GetInstance()->current_test_info()->name();
  for (int64_t n = first; n < first + runs; ++n) {
    const std::string line = "POLYHEAD_FUZZ_SEED=" + std::to_string(seed) +
                             " POLYHEAD_FUZZ_FIRST=" + std::to_string(n) + " POLYHEAD_FUZZ_RUNS=1 " + program +
                             " --gtest_filter='*." + test + "'";
    set_running(line);
    SCOPED_TRACE(line);
    Hostile random(static_cast<uint64_t>(seed) * 0x100000001b3u ^ static_cast<uint64_t>(n) * 0x9e3779b97f4a7c15u);
    round(random);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace polyhead::testing
