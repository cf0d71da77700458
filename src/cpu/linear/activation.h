// Activations and their derivatives: linear::Activation says what they are.
#pragma once

#include "contract/linear.h"
#include "cpu/isa/elementary.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// (1 + erf(x / sqrt(2))) / 2, the distribution function of the normal distribution; NaN stays NaN. Below kBorder
// 1/2 + x C(x^2), above it a tail of 2^T(|x|): minimax fits with errors of 3e-11 and 5e-11, far below a rounding.
inline F normal_distribution(F x) {
  constexpr float kBorder = 1.2f;
  constexpr float kEnd = 5.8f;  // from here on the tail is below 1/16 of an ulp of 1
  constexpr float kCentre[] = {4.7899249e-07f, -9.06525838e-06f, 0.000115030707f, -0.00118709507f,
                               0.00997348782f, -0.0664903745f,   0.398942292f};
  constexpr float kTail[] = {-2.5659499e-06f, 7.63406788e-05f, -0.00105015002f, 0.00900983345f,
                             -0.0551223718f,  -0.456999928f,   -1.15216863f,    -0.999775171f};
  const F a = absolute(x);
  const F z = x * x;
  F p = broadcast(kCentre[0]);
#pragma GCC unroll 8
  for (int i = 1; i < 7; ++i) p = fma(p, z, broadcast(kCentre[i]));
  const F centre = fma(p, x, broadcast(0.5f));
  const F t = select(less(a, broadcast(kEnd)), a, broadcast(kEnd));
  F q = broadcast(kTail[0]);
#pragma GCC unroll 8
  for (int i = 1; i < 8; ++i) q = fma(q, t, broadcast(kTail[i]));
  const F tail = exp2(q, broadcast(1.0f));
  const F outer = select(less(x, broadcast(0.0f)), tail, broadcast(1.0f) - tail);
  return select(less(a, broadcast(kBorder)), centre, select(equal(x, x), outer, x));
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
    case linear::Activation::kGelu: return x * normal_distribution(x);
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
