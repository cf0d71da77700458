// exp2, log and tanh of a vector. Coefficients: minimax fits (exp2) and Cephes' single-precision tables (log, tanh).
#pragma once

#include "cpu/simd.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.693147180559945309417f;
constexpr float kInfinity = __builtin_inff();

// 2^t. Exactly 0 below t = -126 (no subnormal results: they slow some CPUs down by 100) and for -inf; NaN stays NaN.
// Relative error of the polynomial: degree 5 7.5e-8; degree 3 7.5e-5, enough where the result becomes bfloat16.
template <int kDegree>
inline F exp2(F t) {
  const F n = round_to_even(t);
  const F f = t - n;
  F p;
  if constexpr (kDegree == 3) {
    p = fma(broadcast(0.0551716685f), f, broadcast(0.24261114f));
    p = fma(p, f, broadcast(0.693260968f));
    p = fma(p, f, broadcast(0.999928057f));
  } else {
    p = fma(broadcast(0.00132764713f), f, broadcast(0.00967554189f));
    p = fma(p, f, broadcast(0.0555071309f));
    p = fma(p, f, broadcast(0.240221202f));
    p = fma(p, f, broadcast(0.693146944f));
    p = fma(p, f, broadcast(1.0f));
  }
  return scale_by_power(p, n);
}

// Natural logarithm of positive normal numbers; NaN stays NaN.
inline F log(F x) {
  F e = exponent(x);
  F m = mantissa(x);  // [1, 2) -> [sqrt(1/2), sqrt(2))
  const M high = less(broadcast(1.41421356f), m);
  m = select(high, m * broadcast(0.5f), m);
  e = select(high, e + broadcast(1.0f), e);
  const F y = m - broadcast(1.0f);
  F p = broadcast(7.0376836292e-2f);
  p = fma(p, y, broadcast(-1.1514610310e-1f));
  p = fma(p, y, broadcast(1.1676998740e-1f));
  p = fma(p, y, broadcast(-1.2420140846e-1f));
  p = fma(p, y, broadcast(1.4249322787e-1f));
  p = fma(p, y, broadcast(-1.6668057665e-1f));
  p = fma(p, y, broadcast(2.0000714765e-1f));
  p = fma(p, y, broadcast(-2.4999993993e-1f));
  p = fma(p, y, broadcast(3.3333331174e-1f));
  const F y2 = y * y;
  F result = fma(p * y2, y, broadcast(-2.12194440e-4f) * e);
  result = fma(broadcast(-0.5f), y2, result);
  result = (y + result) + broadcast(0.693359375f) * e;
  return select(equal(x, x), result, x);
}

// Hyperbolic tangent; saturates at 1, NaN stays NaN.
inline F tanh(F x) {
  const F a = absolute(x);
  const F z = x * x;  // abs(x) < 0.625: x + x^3 P(x^2)
  F p = broadcast(-5.70498872745e-3f);
  p = fma(p, z, broadcast(2.06390887954e-2f));
  p = fma(p, z, broadcast(-5.37397155531e-2f));
  p = fma(p, z, broadcast(1.33314422036e-1f));
  p = fma(p, z, broadcast(-3.33332819422e-1f));
  const F small = fma(p * z, x, x);
  const F e = exp2<5>(a * broadcast(-2 * kLog2E));
  const F large = (broadcast(1.0f) - e) / (broadcast(1.0f) + e);
  const F signed_large = select(less(x, broadcast(0.0f)), broadcast(0.0f) - large, large);
  return select(less(a, broadcast(0.625f)), small, signed_large);
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
