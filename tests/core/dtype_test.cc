#include "core/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace polyhead {
namespace {

constexpr double kInf = HUGE_VAL;

TEST(DTypes, ConvertEveryHalf) {
  for (uint32_t n = 0; n < 65536; ++n) {
    const auto bits = static_cast<uint16_t>(n);
    const int exponent = static_cast<int>(n >> 10 & 31), fraction = static_cast<int>(n & 1023);
    const double sign = n >> 15 ? -1 : 1;
    const float half = to_float(Float16{bits});
    if (exponent == 31 && fraction) {
      EXPECT_TRUE(std::isnan(half) && std::isnan(to_float(to_float16(half))));
    } else if (exponent == 31) {
      EXPECT_EQ(half, sign * kInf);
    } else {
      const double value = std::ldexp(exponent ? 1024 + fraction : fraction, std::max(exponent, 1) - 25);
      EXPECT_EQ(half, sign * value) << n;
    }
    if (!std::isnan(half)) {
      EXPECT_EQ(to_float16(half).bits, bits);
    }
    const float brain = to_float(BFloat16{bits});
    EXPECT_EQ(std::bit_cast<uint32_t>(brain), n << 16);
    if (std::isnan(brain)) {
      EXPECT_TRUE(std::isnan(to_float(to_bfloat16(brain))));
    } else {
      EXPECT_EQ(to_bfloat16(brain).bits, bits);
    }
  }
}

TEST(DTypes, RoundToNearestEvenOnce) {
  for (uint32_t n = 0; n < 0x7c00; ++n) {  // between neighbours: the even one; a hair beside it: the near one
    const double low = static_cast<double>(to_float(Float16{static_cast<uint16_t>(n)}));
    const double high = n == 0x7bff ? 65536 : static_cast<double>(to_float(Float16{static_cast<uint16_t>(n + 1)}));
    const double middle = (low + high) / 2;
    const uint32_t even = n + n % 2;
    EXPECT_EQ(to_float16(to_float_for_rounding(middle)).bits, even);
    EXPECT_EQ(to_float16(to_float_for_rounding(std::nextafter(middle, 0.0))).bits, n);
    EXPECT_EQ(to_float16(to_float_for_rounding(std::nextafter(middle, 1e9))).bits, n + 1);
    EXPECT_EQ(to_float16(to_float_for_rounding(-middle)).bits, even | 0x8000);
  }
  for (uint32_t n = 0; n < 0x7f80; n += 7) {
    const double low = static_cast<double>(std::bit_cast<float>(n << 16));
    const double high = n == 0x7f7f ? 0x1p128 : static_cast<double>(std::bit_cast<float>((n + 1) << 16));
    const double middle = (low + high) / 2;
    EXPECT_EQ(to_bfloat16(to_float_for_rounding(middle)).bits, n + n % 2);
    EXPECT_EQ(to_bfloat16(to_float_for_rounding(std::nextafter(middle, 0.0))).bits, n);
    EXPECT_EQ(to_bfloat16(to_float_for_rounding(std::nextafter(middle, 1e300))).bits, n + 1);
  }
  EXPECT_EQ(to_bfloat16(std::bit_cast<float>(0x7f800001u)).bits & 0x7fc0, 0x7fc0);  // NaN of a low payload
}

}  // namespace
}  // namespace polyhead
