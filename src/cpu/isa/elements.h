// Vectors of elements of any dtype that kernels take, at any distance: nothing else asks what dtype numbers have.
#pragma once

#include "cpu/isa/operand.h"
#include "cpu/isa/tile.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

inline const float* f32(const void* data) { return static_cast<const float*>(data); }
inline const uint16_t* u16(const void* data) { return static_cast<const uint16_t*>(data); }

// kLanes neighbours of 16 bits, as floats. Any other dtype gives NaN, and is not stored: no number is taken for another.
inline F load_halves(DType dtype, const uint16_t* p) {
  if (dtype == DType::kBFloat16) return load_bf16(p);
  if (dtype == DType::kFloat16) return load_f16(p);
  return broadcast(__builtin_nanf(""));
}

inline void store_halves(DType dtype, uint16_t* p, F x) {
  if (dtype == DType::kBFloat16) {
    store_bf16(p, x);
  } else if (dtype == DType::kFloat16) {
    store_f16(p, x);
  }
}

#ifdef POLYHEAD_HAS_BYTE_TABLE
// The numbers of a byte without a sign as bfloat16, by their low and high bytes: float8_e4m3's times 2^-8, as below.
struct alignas(64) Float8Table {
  uint8_t bytes[256] = {};
  constexpr Float8Table(int fraction_bits, int bias, int first_not_finite) {
    for (int b = 0; b < 128; ++b) {
      int exponent = b >> fraction_bits, fraction = b & ((1 << fraction_bits) - 1);
      if (exponent == 0)
        exponent = 1;
      else
        fraction |= 1 << fraction_bits;
      for (; fraction != 0 && fraction >> fraction_bits == 0; --exponent) fraction *= 2;
      int bits = fraction == 0 ? 0 : (exponent - bias + 126) * 128 + fraction * (128 >> fraction_bits);
      if (b >= first_not_finite) bits = b == first_not_finite && fraction_bits == 2 ? 0x7f80 : 0x7fc0;
      bytes[b] = static_cast<uint8_t>(bits & 255);
      bytes[128 + b] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
constexpr Float8Table kE4M3(3, 7 + 8, 0x7f), kE5M2(2, 15, 0x7c);
constexpr const uint8_t* float8_table(DType dtype) { return dtype == DType::kFloat8E4M3 ? kE4M3.bytes : kE5M2.bytes; }
#endif

// kLanes neighbours of 8 bits, before their scale, by way of float16: float8_e4m3's are those that have 2^-8 their value.
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
inline Halves widened(const uint8_t* p) {
  Bytes bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, Halves);
}
inline F from_halves(Halves x) {
  alignas(32) uint16_t halves[kLanes];
  __builtin_memcpy(halves, &x, sizeof x);
  return load_f16(halves);
}
inline F load_e4m3(const uint8_t* p) {
#ifdef POLYHEAD_HAS_BYTE_TABLE
  return floats_from_table(p, kE4M3.bytes);
#else
  const Halves x = widened(p), magnitude = x & 0x7f;
  const Halves nan = reinterpret_cast<Halves>(magnitude == 0x7f);
  return from_halves((x & 0x80) << 8 | (nan & 0x7e00) | (~nan & magnitude << 7));
#endif
}
inline F load_e5m2(const uint8_t* p) { return from_halves(widened(p) << 8); }

#ifndef POLYHEAD_HAS_INT4
// kLanes neighbours of 4 bits, in pairs.
inline F load_int4(const uint8_t* p) {
  typedef uint8_t Pairs __attribute__((vector_size(kLanes / 2)));
  typedef uint16_t Apart __attribute__((vector_size(kLanes)));
  Pairs pairs;
  __builtin_memcpy(&pairs, p, sizeof pairs);
  const Apart x = __builtin_convertvector(pairs, Apart);
  const Bytes numbers = (reinterpret_cast<Bytes>((x & 15) | (x & 0xf0) << 4) ^ 8) - 8;  // the sign is bit 3
  alignas(16) int8_t signed_numbers[kLanes];
  __builtin_memcpy(signed_numbers, &numbers, sizeof numbers);
  return load_int8(signed_numbers);
}
#endif

// kLanes neighbours of a dtype that has scales, before their scale.
inline F load_stored(const uint8_t* p, DType dtype) {
  switch (dtype) {
    case DType::kInt8: return load_int8(reinterpret_cast<const int8_t*>(p));
    case DType::kInt4x2: return load_int4(p);
    case DType::kFloat8E5M2: return load_e5m2(p);
    default: return load_e4m3(p);
  }
}

// How many times too small load_stored reads numbers.
constexpr float stored_factor(DType dtype) { return dtype == DType::kFloat8E4M3 ? 256.0f : 1.0f; }

// n <= kLanes numbers of a row of a dtype that has scales, from number `first` on, before their scale; the lanes behind them
// are 0. Pairs: `first` is even, or n is 1.
inline F load_stored(const void* row, DType dtype, int64_t first, int64_t stride, int n) {
  const bool pairs = dtype == DType::kInt4x2;
  const uint8_t* const source = static_cast<const uint8_t*>(row) + (pairs ? first / 2 : first) * stride;
  if (n == kLanes && stride == 1) return load_stored(source, dtype);
  alignas(16) uint8_t buffer[kLanes] = {};
  for (int i = 0; i < (pairs ? (n + 1) / 2 : n); ++i) buffer[i] = source[i * stride];
  if (pairs && first % 2 == 1) buffer[0] = static_cast<uint8_t>(buffer[0] >> 4);
  if (pairs && n % 2 == 1) buffer[n / 2] &= 15;
  return load_stored(buffer, dtype);
}

// n <= kLanes elements from element `at` on, `stride` apart, as floats; the lanes behind them are 0.
inline F load_elements(const void* data, DType dtype, int64_t at, int64_t stride, int n) {
  if (dtype == DType::kFloat32) {
    if (stride == 1) return n == kLanes ? load(f32(data) + at) : load_first(f32(data) + at, n);
    alignas(64) float buffer[kLanes] = {};
    for (int i = 0; i < n; ++i) buffer[i] = f32(data)[at + i * stride];
    return load(buffer);
  }
  alignas(32) uint16_t buffer[kLanes] = {};
  const uint16_t* source = u16(data) + at;
  if (n < kLanes || stride != 1) {
    for (int i = 0; i < n; ++i) buffer[i] = source[i * stride];
    source = buffer;
  }
  return load_halves(dtype, source);
}

// The other way, rounded to nearest even.
inline void store_elements(void* data, DType dtype, int64_t at, int64_t stride, F x, int n) {
  if (dtype == DType::kFloat32 && stride == 1) {
    store_first(static_cast<float*>(data) + at, x, n);
    return;
  }
  if (dtype == DType::kFloat32) {
    alignas(64) float buffer[kLanes];
    store(buffer, x);
    for (int i = 0; i < n; ++i) static_cast<float*>(data)[at + i * stride] = buffer[i];
    return;
  }
  alignas(32) uint16_t buffer[kLanes];
  uint16_t* target = static_cast<uint16_t*>(data) + at;
  uint16_t* whole = n == kLanes && stride == 1 ? target : buffer;
  store_halves(dtype, whole, x);
  if (whole == buffer) {
    for (int i = 0; i < n; ++i) target[i * stride] = buffer[i];
  }
}

// The same, added to what is there if `accumulate`.
inline void store_sum(void* data, DType dtype, int64_t at, int64_t stride, F x, int n, bool accumulate) {
  if (accumulate) x = x + load_elements(data, dtype, at, stride, n);
  store_elements(data, dtype, at, stride, x, n);
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
