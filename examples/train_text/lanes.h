// Sums, maxima and exponentials over a row in the form that compilers turn into vector code.
#pragma once

#include <bit>
#include <cstdint>

namespace polyhead::demo {

inline constexpr int kLanes = 16;

/// The sum of term(i) for i in [0, count), in an order that depends on count alone.
template <class Term>
float sum_of(int64_t count, const Term& term) {
  float lanes[kLanes] = {};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int64_t i = whole; i < count; ++i) lanes[0] += term(i);
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

/// The largest of x[0 .. count), count >= 1.
inline float max_of(const float* x, int64_t count) {
  float lanes[kLanes];
  for (float& lane : lanes) lane = x[0];
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
  }
  float most = lanes[0];
  for (const float lane : lanes) most = lane > most ? lane : most;
  for (int64_t i = whole; i < count; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

/// exp(x) for x <= 0, to about 2e-7 of it; below -87 as at -87. std::exp would keep its loop from becoming vector code.
/// x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, the first short enough for n times it to be exact.
inline float exp_of_negative(float x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float bounded = x < -87.0f ? -87.0f : x;
  const float n = (bounded * kLog2E + kToInteger) - kToInteger;
  const float r = (bounded - n * kLn2High) - n * kLn2Low;
  float sum = 1.0f / 720;  // Taylor: the next term is r^7 / 5040 <= 1.2e-7
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  return sum * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
}

}  // namespace polyhead::demo
