// Elements of tensors as words of the device. Of bfloat16 and float16 two lie in a register, the first in the low half.
#pragma once

#include <cstdint>

#include "cuda/problem.h"

namespace polyhead::cuda {

struct BFloat16 {
  static constexpr bool kOnTensorCores = true;
  static constexpr bool kRestOfWeights = false;
  uint16_t bits;
};
struct Float16 {
  static constexpr bool kOnTensorCores = true;
  // Weights P are multiplied as a float16 and the rest: their rounding would be as large as that of the result.
  static constexpr bool kRestOfWeights = true;
  uint16_t bits;
};

struct Float32 {
  static constexpr bool kOnTensorCores = false;
  uint32_t bits;
};

template <class T>
__device__ inline unsigned packed(float low, float high);  // rounded to nearest even
template <>
__device__ inline unsigned packed<BFloat16>(float low, float high) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <>
__device__ inline unsigned packed<Float16>(float low, float high) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ inline float to_float(BFloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ inline float to_float(Float16 x) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
}

__device__ inline float to_float(Float32 x) { return __uint_as_float(x.bits); }

template <class T>
__device__ inline T rounded(float x) {
  if constexpr (T::kOnTensorCores) {
    return {static_cast<uint16_t>(packed<T>(x, 0))};
  } else {
    return {__float_as_uint(x)};
  }
}

template <class T>
__device__ inline float low_half(unsigned both) {
  return to_float(T{static_cast<uint16_t>(both)});
}
template <class T>
__device__ inline float high_half(unsigned both) {
  return to_float(T{static_cast<uint16_t>(both >> 16)});
}

// Two elements side by side, read at once.
template <class E>
struct alignas(2 * sizeof(E)) TwoElements {
  E first, second;
};

// Element n of an array.
__device__ inline float load_number(const void* data, Number number, int64_t n) {
  switch (number) {
    case Number::kBFloat16: return to_float(static_cast<const BFloat16*>(data)[n]);
    case Number::kFloat16: return to_float(static_cast<const Float16*>(data)[n]);
    case Number::kFloat64: return static_cast<float>(static_cast<const double*>(data)[n]);
    default: return static_cast<const float*>(data)[n];
  }
}
__device__ inline void store_number(void* data, Number number, int64_t n, float x) {
  switch (number) {
    case Number::kBFloat16: static_cast<BFloat16*>(data)[n] = rounded<BFloat16>(x); break;
    case Number::kFloat16: static_cast<Float16*>(data)[n] = rounded<Float16>(x); break;
    case Number::kFloat64: static_cast<double*>(data)[n] = x; break;
    default: static_cast<float*>(data)[n] = x;
  }
}

// function(T{}) of the type that a tensor's elements have.
template <class Function>
auto with_elements(Number number, const Function& function) {
  if (number == Number::kBFloat16) return function(BFloat16{});
  return number == Number::kFloat16 ? function(Float16{}) : function(Float32{});
}

inline int columns_of(const Problem& p) { return tile_columns(p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v); }

// function.operator()<kD>() of the columns of tiles.
template <class Function>
auto with_columns(int columns, const Function& function) {
  if (columns == 64) return function.template operator()<64>();
  if (columns == 128) return function.template operator()<128>();
  return columns == kManyColumns ? function.template operator()<kManyColumns>()
                                 : function.template operator()<kMostTileColumns>();
}

// A power of two, at most 2^126, that brings x, which is not negative, between 2^14 and 2^15: of what is below 6e-5 float16
// holds few digits.
__device__ inline float power_for(float x) {
  const unsigned exponent = __float_as_uint(x) >> 23;  // 127 of 1
  return __uint_as_float((exponent < 15 ? 253 : 268 - exponent) << 23);
}
__device__ inline float one_over_power(float x) { return __uint_as_float((254u << 23) - __float_as_uint(x)); }

// Which halves of a register hold an infinity or a NaN: a mask of their bits.
template <class T>
__device__ inline unsigned not_finite(unsigned both);
template <>
__device__ inline unsigned not_finite<BFloat16>(unsigned both) {
  return ((both & 0x7f80) == 0x7f80 ? 0xffffu : 0) | ((both & 0x7f800000) == 0x7f800000 ? 0xffff0000u : 0);
}
template <>
__device__ inline unsigned not_finite<Float16>(unsigned both) {
  return ((both & 0x7c00) == 0x7c00 ? 0xffffu : 0) | ((both & 0x7c000000) == 0x7c000000 ? 0xffff0000u : 0);
}

template <>
__device__ inline unsigned not_finite<Float32>(unsigned one) {
  return (one & 0x7f800000) == 0x7f800000 ? ~0u : 0;
}

// 2^x within 2 ulp; of -inf 0
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLog2E = 1.44269504f;

// exp(x), as exact as the element type deserves. x is not +inf.
template <class T>
__device__ inline float exponential(float x) {
  if constexpr (T::kOnTensorCores) return exp2_approx(x * kLog2E);
  constexpr float kLn2 = 0.693147182f, kRestOfLn2 = -1.90465429e-9f;
  const float bounded = x < -200 ? -200 : x, power = bounded * kLog2E;
  const float rest = fmaf(power, -kRestOfLn2, fmaf(power, -kLn2, bounded));  // what 2^power lacks
  const float y = exp2_approx(power);
  return fmaf(y, rest, y);
}

}  // namespace polyhead::cuda
