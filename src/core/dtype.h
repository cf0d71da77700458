// Elements of every dtype as C++ values: bfloat16 and float16 (IEEE binary16) to and from float and double, rounded to
// nearest even, NaN kept. Plain code for any CPU; the kernels of src/cpu have vector forms of their own.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "polyhead/tensor.h"

namespace polyhead {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

constexpr float to_float(float x) { return x; }

constexpr float to_float(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

constexpr float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  uint32_t bits = magnitude + (112u << 23);                          // exponent bias 15 -> 127
  if ((x.bits & 0x7c00) == 0x7c00) bits = magnitude + (224u << 23);  // inf, NaN: exponent 31 -> 255
  if ((x.bits & 0x7c00) == 0) bits = std::bit_cast<uint32_t>(static_cast<float>(x.bits & 0x3ff) * 0x1p-24f);
  return std::bit_cast<float>(sign | bits);
}

constexpr float to_float(Float8E5M2 x) { return to_float(Float16{static_cast<uint16_t>(x.bits << 8)}); }

constexpr float to_float(Float8E4M3 x) {
  const int magnitude = x.bits & 0x7f, sign = (x.bits & 0x80) << 8;
  if (magnitude == 0x7f) return to_float(Float16{static_cast<uint16_t>(sign | 0x7e00)});
  return 256 * to_float(Float16{static_cast<uint16_t>(sign | magnitude << 7)});  // exponent bias 15 -> 7
}

constexpr BFloat16 to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x)
    return {static_cast<uint16_t>(bits >> 16 | 0x40)};  // quiet: a payload in the low half must not become inf
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

constexpr Float16 to_float16(float x) {
  const uint32_t all = std::bit_cast<uint32_t>(x);
  const uint32_t sign = all >> 16 & 0x8000;
  uint32_t bits = all & 0x7fffffff;
  if (bits > 0x7f800000) {
    bits = 0x7e00 | (bits >> 13 & 0x3ff);  // NaN
  } else if (bits >= 0x47800000) {
    bits = 0x7c00;  // 65536 and more
  } else if (bits >= 0x38800000) {
    bits = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;  // normal; 65520 and more carry into inf
  } else {
    bits = std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + 0.5f) - 0x3f000000;  // 0.5 has an ulp of 2^-24
  }
  return {static_cast<uint16_t>(sign | bits)};
}

// The bits of |x|, which is below 2^16, in a format of `fraction` bits and this exponent bias; nearest even, as if its
// exponents had no end.
constexpr uint32_t rounded_magnitude(float x, int fraction, int bias) {
  const uint32_t bits = std::bit_cast<uint32_t>(x) & 0x7fffffff, shift = static_cast<uint32_t>(23 - fraction);
  if (bits < static_cast<uint32_t>(128 - bias) << 23) {  // subnormal: the ulp of `one` is the format's least number
    const uint32_t one = static_cast<uint32_t>(127 + 24 - fraction - bias) << 23;
    return std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + std::bit_cast<float>(one)) - one;
  }
  return ((bits + (1u << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift) -
         (static_cast<uint32_t>(127 - bias) << fraction);
}

constexpr uint8_t sign_of_float8(float x) { return static_cast<uint8_t>(std::bit_cast<uint32_t>(x) >> 24 & 0x80); }

constexpr Float8E4M3 to_float8_e4m3(float x) {
  const bool number = x > -464 && x < 464;  // else beyond the largest, 448: NaN
  return {static_cast<uint8_t>(sign_of_float8(x) | (number ? rounded_magnitude(x, 3, 7) : 0x7f))};
}

constexpr Float8E5M2 to_float8_e5m2(float x) {
  if (x != x) return {0x7f};
  const bool finite = x > -61440 && x < 61440;
  return {static_cast<uint8_t>(sign_of_float8(x) | (finite ? rounded_magnitude(x, 2, 15) : 0x7c))};
}

// A float that rounds on to any narrower type as `x` itself would (round to odd: Boldo, Melquiond 2005).
constexpr float to_float_for_rounding(float x) { return x; }
constexpr float to_float_for_rounding(double x) {
  const float nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || x != x) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  const double magnitude = x < 0 ? -x : x;
  if (static_cast<double>(std::bit_cast<float>(bits & 0x7fffffff)) > magnitude) --bits;
  return std::bit_cast<float>(bits | 1);
}

// An element as a number to compute with, and back, rounded once.
template <class T, class E>
constexpr T widen(E x) {
  return static_cast<T>(to_float(x));
}
template <class T>
constexpr T widen(double x) {
  return static_cast<T>(x);
}
template <class E, class T>
constexpr E narrow(T x) {
  if constexpr (std::is_same_v<E, BFloat16>) return to_bfloat16(to_float_for_rounding(x));
  if constexpr (std::is_same_v<E, Float16>) return to_float16(to_float_for_rounding(x));
  if constexpr (std::is_floating_point_v<E>) return static_cast<E>(x);
}

// Calls f(E()) with the element type of a floating-point `dtype`.
template <class F>
void with_element_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32: f(float()); break;
    case DType::kFloat64: f(double()); break;
    case DType::kBFloat16: f(BFloat16()); break;
    case DType::kFloat16: f(Float16()); break;
    default: break;
  }
}

// Element `at` (counted from `data`) of an array of numbers.
inline double load_element(const void* data, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kFloat32: return static_cast<double>(static_cast<const float*>(data)[at]);
    case DType::kFloat64: return static_cast<const double*>(data)[at];
    case DType::kBFloat16: return static_cast<double>(to_float(static_cast<const BFloat16*>(data)[at]));
    case DType::kFloat16: return static_cast<double>(to_float(static_cast<const Float16*>(data)[at]));
    case DType::kInt8: return static_cast<const int8_t*>(data)[at];
    case DType::kFloat8E4M3: return static_cast<double>(to_float(static_cast<const Float8E4M3*>(data)[at]));
    case DType::kFloat8E5M2: return static_cast<double>(to_float(static_cast<const Float8E5M2*>(data)[at]));
    default: return 0;
  }
}

// Whether numbers of this dtype are multiplied by scales: AttentionDesc::key_dtype.
constexpr bool has_scales(DType dtype) {
  return dtype == DType::kInt8 || dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2 || dtype == DType::kInt4x2;
}
constexpr DType scale_dtype(DType dtype) { return dtype == DType::kInt4x2 ? DType::kFloat16 : DType::kFloat32; }

// Number `i` of a row of `dtype`, whose elements lie `stride` apart, before its scale.
inline double load_stored(const void* row, DType dtype, int64_t i, int64_t stride) {
  if (dtype != DType::kInt4x2) return load_element(row, dtype, i * stride);
  const int pair = static_cast<const int8_t*>(row)[i / 2 * stride];
  return i % 2 == 1 ? pair >> 4 : static_cast<int8_t>(static_cast<uint8_t>(pair) << 4) >> 4;
}

// Stores `value`, rounded once.
inline void store_element(void* data, DType dtype, int64_t at, double value) {
  switch (dtype) {
    case DType::kFloat32: static_cast<float*>(data)[at] = static_cast<float>(value); break;
    case DType::kFloat64: static_cast<double*>(data)[at] = value; break;
    case DType::kBFloat16: static_cast<BFloat16*>(data)[at] = to_bfloat16(to_float_for_rounding(value)); break;
    case DType::kFloat16: static_cast<Float16*>(data)[at] = to_float16(to_float_for_rounding(value)); break;
    default: break;
  }
}

}  // namespace polyhead
