// Activations and their derivatives: linear::Activation says what they are.
#pragma once

#include "contract/linear.h"
#include "cpu/isa/elementary.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Beyond it the tails of the normal distribution are below 1/16 of an ulp of 1.
constexpr float kTailEnd = 5.8f;

inline F clamped_to_tails(F a) { return select(less(broadcast(kTailEnd), a), broadcast(kTailEnd), a); }

// 1 - erf(a / sqrt(2)), both tails of the normal distribution together, for a in [0, kTailEnd]; NaN stays NaN. It is
// 2^(a Q(a)), of which a minimax fit is at most 7e-10 off, far below a rounding, and in relative terms 2.3e-6 where it ends.
inline F normal_tails(F a) {
  constexpr float kTails[] = {3.58628771e-09f, -1.25700254e-07f, 1.95844063e-06f, -1.77893417e-05f,
                              0.000101662263f, -0.00033639968f,  7.6602133e-05f,  0.00688801985f,
                              -0.0524181426f,  -0.459224492f,    -1.15110409f};
  F q = broadcast(kTails[0]);
#pragma GCC unroll 10
  for (int i = 1; i < 11; ++i) q = fma(q, a, broadcast(kTails[i]));
  return exp2(q, a);
}

// (1 + erf(x / sqrt(2))) / 2, the distribution function of the normal distribution; NaN stays NaN.
inline F normal_distribution(F x) {
  const F tail = broadcast(0.5f) * normal_tails(clamped_to_tails(absolute(x)));
  return select(less(x, broadcast(0.0f)), tail, broadcast(1.0f) - tail);
}

// x times that: what x has above 0, less what its tail takes away.
inline F gelu(F x) {
  const F a = clamped_to_tails(absolute(x));
  const F above = select(less(x, broadcast(0.0f)), broadcast(0.0f), x);
  return fma(broadcast(-0.5f) * a, normal_tails(a), above);
}

inline F normal_density(F x) {
  constexpr float kInverseSqrt2Pi = 0.398942280401432678f;
  return broadcast(kInverseSqrt2Pi) * exp2(x * x, broadcast(-0.5f * kLog2E));
}

// 1 / (1 + exp(-x)), without overflow.
inline F sigmoid(F x) {
  const F e = exp2(absolute(x), broadcast(-kLog2E));
  const F numerator = select(less(x, broadcast(0.0f)), e, broadcast(1.0f));
  return numerator / (broadcast(1.0f) + e);
}

constexpr float kSqrt2OverPi = 0.797884560802865356f;
constexpr float kGeluCube = 0.044715f;

inline F gelu_tanh(F x) {
  const F cubed = fma(x * x * x, broadcast(kGeluCube), x);
  return tanh(broadcast(kSqrt2OverPi) * cubed);
}

inline F activate(linear::Activation function, F x) {
  const F zero = broadcast(0.0f), one = broadcast(1.0f), half = broadcast(0.5f);
  switch (function) {
    case linear::Activation::kRelu: return select(less(x, zero), zero, x);
    case linear::Activation::kGelu: return gelu(x);
    case linear::Activation::kGeluTanh: return x * half * (one + gelu_tanh(x));
    case linear::Activation::kSilu: return x * sigmoid(x);
    case linear::Activation::kNone: break;
  }
  return x;
}

inline F activation_derivative(linear::Activation function, F x) {
  const F zero = broadcast(0.0f), one = broadcast(1.0f), half = broadcast(0.5f);
  switch (function) {
    case linear::Activation::kRelu: return select(less(zero, x), one, select(equal(x, x), zero, x));
    case linear::Activation::kGelu: return fma(x, normal_density(x), normal_distribution(x));
    case linear::Activation::kGeluTanh: {
      const F t = gelu_tanh(x);
      const F inner = broadcast(kSqrt2OverPi) * fma(x * x, broadcast(3 * kGeluCube), one);
      const F slope = fma(zero - t, t, one) * inner;
      return half * fma(x, slope, one + t);
    }
    case linear::Activation::kSilu: {
      const F s = sigmoid(x);
      return s * fma(x, one - s, one);
    }
    case linear::Activation::kNone: break;
  }
  return one;
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
