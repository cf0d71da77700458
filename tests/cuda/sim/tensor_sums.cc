#include "tensor_sums.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace cuda_sim {
namespace {

constexpr int kKept = 25;                              // bits behind the first of the largest
constexpr int16_t kZero = -3000, kNotFinite = 10'000;  // sums with any exponent tell

int16_t exponent_of(float x, int least) {
  const int biased = static_cast<int>(std::bit_cast<uint32_t>(x) >> 23 & 255);
  if (x == 0) return kZero;
  return biased == 255 ? kNotFinite : static_cast<int16_t>(std::max(biased - 127, least));
}

float power_of_2(int exponent) { return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23); }

// Towards zero, but to infinity where float's numbers end.
float cut_off(double x) {
  const float nearest = static_cast<float>(x);
  if (std::fabs(x) >= 0x1p128) return nearest;
  return std::fabs(static_cast<double>(nearest)) > std::fabs(x) ? std::nextafter(nearest, 0.0f) : nearest;
}

// One sum of any numbers. `largest`: the largest exponent.
template <int kK>
float one_sum(const float (&a)[kK], const float (*b)[8], int column, float c, int largest) {
  if (largest < kZero / 2) return 0;  // all are 0
  if (largest > kNotFinite / 2) {
    for (int k = 0; k < kK; ++k) c += a[k] * b[k][column];
    return c;
  }
  double sum = std::trunc(std::ldexp(static_cast<double>(c), kKept - largest));
  for (int k = 0; k < kK; ++k) {
    sum += std::trunc(std::ldexp(static_cast<double>(a[k]) * static_cast<double>(b[k][column]), kKept - largest));
  }
  return cut_off(std::ldexp(sum, largest - kKept));
}

// Of a row, where no exponent is near the ends of float's: products are whole numbers of less than 28 bits, once scaled.
template <int kK>
void row_of_sums(const float (&a)[kK], const float (*b)[8], float (&c)[8], const int16_t (&largest)[8]) {
  float scale[8];
  int32_t sums[8];
  for (int n = 0; n < 8; ++n) {
    scale[n] = power_of_2(kKept - largest[n]);
    sums[n] = 0;
  }
  for (int k = 0; k < kK; ++k) {
    for (int n = 0; n < 8; ++n) sums[n] += static_cast<int32_t>(a[k] * b[k][n] * scale[n]);
  }
  for (int n = 0; n < 8; ++n) {
    const double sum = static_cast<double>(sums[n]) + static_cast<double>(static_cast<int32_t>(c[n] * scale[n]));
    constexpr uint64_t kBehindFloat = (uint64_t{1} << 29) - 1;
    const auto cut = std::bit_cast<double>(std::bit_cast<uint64_t>(sum) & ~kBehindFloat);
    c[n] = static_cast<float>(cut) * power_of_2(largest[n] - kKept);
  }
}

}  // namespace

template <int kK>
void add_products(const float (*a)[kK], const float (*b)[8], float (*c)[8], int rows, int least_exponent) {
  int16_t of_b[kK][8];
  for (int k = 0; k < kK; ++k) {
    for (int n = 0; n < 8; ++n) of_b[k][n] = exponent_of(b[k][n], least_exponent);
  }
  for (int row = 0; row < rows; ++row) {
    int16_t largest[8];
    for (int n = 0; n < 8; ++n) largest[n] = exponent_of(c[row][n], -126);
    for (int k = 0; k < kK; ++k) {
      const int16_t of_a = exponent_of(a[row][k], least_exponent);
      for (int n = 0; n < 8; ++n) largest[n] = std::max(largest[n], static_cast<int16_t>(of_a + of_b[k][n]));
    }
    bool ordinary = true;
    for (int n = 0; n < 8; ++n) ordinary = ordinary && std::abs(largest[n]) <= 100;
    if (ordinary) {
      row_of_sums(a[row], b, c[row], largest);
    } else {
      for (int n = 0; n < 8; ++n) c[row][n] = one_sum(a[row], b, n, c[row][n], largest[n]);
    }
  }
}

template void add_products<4>(const float (*)[4], const float (*)[8], float (*)[8], int, int);
template void add_products<8>(const float (*)[8], const float (*)[8], float (*)[8], int, int);
template void add_products<16>(const float (*)[16], const float (*)[8], float (*)[8], int, int);

}  // namespace cuda_sim
