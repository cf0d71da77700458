// exp2, log and tanh of a vector. Coefficients: minimax fits (exp2) and Cephes' single-precision tables (log, tanh).
#pragma once

#include "cpu/isa/simd.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLog2ELow = 1.92596299e-8f;  // what kLog2E lacks
constexpr float kLn2 = 0.693147180559945309417f;
constexpr float kInfinity = __builtin_inff();

// 2^f for f in [-1/2, 1/2]; relative error 1.9e-9, far below a rounding. 2^0 is exactly 1.
inline F exp2_fraction(F f) {
  F p = fma(broadcast(0.000153458124f), f, broadcast(0.00133999309f));
  p = fma(p, f, broadcast(0.00961848907f));
  p = fma(p, f, broadcast(0.0555032864f));
  p = fma(p, f, broadcast(0.240226462f));
  p = fma(p, f, broadcast(0.693147182f));
  return fma(p, f, broadcast(1.0f));
}

// 2^(x * factor), inf from 2^127.5 on. Exactly 0 below 2^-126 (no subnormal results: where one enters a product, some CPUs take
// as long as for 100) and for -inf; NaN stays NaN. The fraction comes from one fused operation, so a large product costs no
// precision.
inline F exp2(F x, F factor) {
  const F y = x * factor, n = round_to_even(y);
  return scale_by_small_power(exp2_fraction(fms(x, factor, n)), n, y);
}

// e^x is this times 2^n. kLog2E alone is 1.3e-8 too small, which all results would share: e^-7 were 9e-8 too large.
inline F exp_fraction(F x, F n) { return exp2_fraction(fma(x, broadcast(kLog2ELow), fms(x, broadcast(kLog2E), n))); }

// e^x, likewise, but finite as long as floats are.
inline F exp(F x) {
  const F y = x * broadcast(kLog2E), n = round_to_even(y);
  return scale_by_power(exp_fraction(x, n), n, y);
}

// e^x of weights, which are 1 at most: inf from 2^127.5 on, as exp2.
inline F exp_of_weight(F x) {
  const F y = x * broadcast(kLog2E), n = round_to_even(y);
  return scale_by_small_power(exp_fraction(x, n), n, y);
}

// exp2 and exp_of_weight of what is rounded to bfloat16 next, in two thirds of the operations. A weight of 1/4 is
// right to 2e-7, smaller ones to less.
#ifdef POLYHEAD_HAS_FRACTION
inline F exp2_of_fraction_short(F y) {
  const F f = fraction(y);  // of [0, 1]
  F p = fma(broadcast(0.00186713017f), f, broadcast(0.00901702978f));
  p = fma(p, f, broadcast(0.0557999127f));
  p = fma(p, f, broadcast(0.240164444f));
  p = fma(p, f, broadcast(0.693151295f));
  return fma(p, f, broadcast(1.0f));
}
inline F exp2_short(F y) { return scale_by_floor(exp2_of_fraction_short(y), y); }
// While SubnormalsAsZero is there.
inline F exp2_flushed(F y) { return scale_by_floor_flushed(exp2_of_fraction_short(y), y); }
inline F exp2_of_pair(F x, F factor) { return exp2_short(x * factor); }
inline F exp_of_pair(F x) { return exp2_short(fma(x, broadcast(kLog2E), x * broadcast(kLog2ELow))); }
#else
inline F exp2_of_pair(F x, F factor) { return exp2(x, factor); }
inline F exp_of_pair(F x) { return exp_of_weight(x); }
#endif

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
  const F e = exp2(a, broadcast(-2 * kLog2E));
  const F large = fma(broadcast(-2.0f), e / (broadcast(1.0f) + e), broadcast(1.0f));
  const F signed_large = select(less(x, broadcast(0.0f)), broadcast(0.0f) - large, large);
  return select(less(a, broadcast(0.625f)), small, signed_large);
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
