// Any CPU: 4 lanes of the compiler's vector extension. See simd.h for what each word means.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kLanes = 4;
constexpr int kRegisters = 16;
typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));
using M = I;  // all bits of a lane set, or none

inline I as_int(F x) { return reinterpret_cast<I>(x); }
inline F as_float(I x) { return reinterpret_cast<F>(x); }

inline void keep_in_register(F& x) {
#if defined(__x86_64__)
  asm volatile("" : "+x"(x));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(x));
#else
  asm volatile("" : "+m"(x));
#endif
}
inline F load(const float* p) {
  F x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline F load_first(const float* p, int n) {
  F x = {};
  for (int i = 0; i < n; ++i) x[i] = p[i];
  return x;
}
inline void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
inline void store_first(float* p, F x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x[i];
}
inline F broadcast(float x) { return F{x, x, x, x}; }
inline F fma(F a, F b, F c) { return a * b + c; }  // two roundings where the CPU has no fused form
inline F fms(F a, F b, F c) {                      // the product of two floats is exact in double
  typedef double D __attribute__((vector_size(32)));
  const D product = __builtin_convertvector(a, D) * __builtin_convertvector(b, D);
  return __builtin_convertvector(product - __builtin_convertvector(c, D), F);
}
inline F select(M m, F a, F b) { return as_float((m & as_int(a)) | (~m & as_int(b))); }
inline F divide(F x, F divisor, F) { return x / divisor; }
inline F maximum(F a, F b) { return select(a > b, a, b); }
inline F absolute(F x) { return as_float(as_int(x) & 0x7fffffff); }
inline F round_to_even(F x) {  // magnitudes from 2^23 on are integers already; NaN and inf pass
  const F magic = broadcast(8388608.0f);
  const F sign = as_float(as_int(x) & static_cast<int32_t>(0x80000000u));
  const F shift = as_float(as_int(magic) | as_int(sign));
  return select(absolute(x) < magic, (x + shift) - shift, x);
}

inline M less(F a, F b) { return a < b; }
inline M equal(F a, F b) { return a == b; }
inline M outside(F x, float limit) { return ~(x <= broadcast(limit)) | (x < broadcast(0.0f)); }
inline M both(M a, M b) { return a & b; }
inline M either(M a, M b) { return a | b; }
inline M negate(M a) { return ~a; }
inline bool any(M m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }
inline uint32_t bits(M m) { return static_cast<uint32_t>((m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8)); }
inline M mask_from_bits(uint32_t b) {
  const I bit = {1, 2, 4, 8};
  const int32_t word = static_cast<int32_t>(b);
  return (I{word, word, word, word} & bit) == bit;
}

inline I broadcast_int(int32_t x) { return I{x, x, x, x}; }
inline I iota() { return I{0, 1, 2, 3}; }
inline I load_int(const int32_t* p) {
  I x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline I add_int(I a, I b) { return reinterpret_cast<I>(reinterpret_cast<U>(a) + reinterpret_cast<U>(b)); }
inline I xor_int(I a, I b) { return a ^ b; }
inline I and_int(I a, I b) { return a & b; }
template <int kBits>
inline I shift_right(I a) {
  return reinterpret_cast<I>(reinterpret_cast<U>(a) >> kBits);
}
inline M less_int(I a, I b) { return a < b; }
inline F to_float(I a) { return __builtin_convertvector(a, F); }
inline void multiply_wide(I a, I b, I& high, I& low) {
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t product = uint64_t{static_cast<uint32_t>(a[i])} * static_cast<uint32_t>(b[i]);
    high[i] = static_cast<int32_t>(product >> 32);
    low[i] = static_cast<int32_t>(static_cast<uint32_t>(product));
  }
}

inline F scale_by_power(F x, F n, F y) {
  // Two factors, so that every n from -126 to 254 gives a finite power. n is an integer, or NaN, or -inf.
  const F low = broadcast(-126.0f), high = broadcast(254.0f);
  const F clamped = select(n > low, select(n < high, n, high), low);
  const I e = __builtin_convertvector(clamped, I);
  const I half = e >> 1;
  const F product = x * as_float((half + 127) << 23) * as_float((e - half + 127) << 23);
  return as_float(~(y < low) & as_int(product));
}
inline F scale_by_small_power(F x, F n, F y) {
  const F low = broadcast(-126.0f), high = broadcast(128.0f);
  const I e = __builtin_convertvector(select(n > low, select(n < high, n, high), low), I);
  return as_float(~(y < low) & as_int(x * as_float((e + 127) << 23)));
}
inline F mantissa(F x) { return as_float((as_int(x) & 0x007fffff) | 0x3f800000); }
inline F exponent(F x) { return to_float((shift_right<23>(as_int(x)) & 255) - 127); }

inline float scalar_from_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
  float x;
  uint32_t word;
  if (rest >= 0x7c00) {  // inf, NaN (made quiet)
    word = 0x7f800000 | ((rest & 0x3ff) << 13) | (rest > 0x7c00 ? 0x400000 : 0);
  } else if (rest >= 0x400) {
    word = (rest << 13) + (112u << 23);
  } else {  // subnormal: rest * 2^-24
    x = static_cast<float>(rest) * 0x1p-24f;
    __builtin_memcpy(&word, &x, 4);
  }
  word |= sign;
  __builtin_memcpy(&x, &word, 4);
  return x;
}
inline uint16_t scalar_to_f16(float x) {
  uint32_t word;
  __builtin_memcpy(&word, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((word >> 16) & 0x8000);
  word &= 0x7fffffff;
  if (word > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | ((word >> 13) & 0x3ff));
  if (word >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and above round to inf
  if (word < 0x38800000) {  // subnormal result: let the addition round to a multiple of 2^-24
    float magnitude;
    __builtin_memcpy(&magnitude, &word, 4);
    magnitude += 0.5f;  // one unit in the last place of [0.5, 1) is 2^-24
    __builtin_memcpy(&word, &magnitude, 4);
    return static_cast<uint16_t>(sign | (word - 0x3f000000));
  }
  const uint32_t rounded = word + 0xfff + ((word >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}
inline F load_bf16(const uint16_t* p) { return as_float(I{p[0] << 16, p[1] << 16, p[2] << 16, p[3] << 16}); }
inline F load_f16(const uint16_t* p) {
  return F{scalar_from_f16(p[0]), scalar_from_f16(p[1]), scalar_from_f16(p[2]), scalar_from_f16(p[3])};
}
inline F load_bf16_first(const uint16_t* p, int n) {
  uint16_t buffer[kLanes] = {};
  for (int i = 0; i < n; ++i) buffer[i] = p[i];
  return load_bf16(buffer);
}
inline F load_f16_first(const uint16_t* p, int n) {
  uint16_t buffer[kLanes] = {};
  for (int i = 0; i < n; ++i) buffer[i] = p[i];
  return load_f16(buffer);
}
inline F load_int8(const int8_t* p) { return to_float(I{p[0], p[1], p[2], p[3]}); }
inline F load_bool(const uint8_t* p) {
  return F{p[0] ? 1.0f : 0.0f, p[1] ? 1.0f : 0.0f, p[2] ? 1.0f : 0.0f, p[3] ? 1.0f : 0.0f};
}
inline uint64_t nonzero_bytes(const uint8_t* p) {
  uint64_t bits = 0;
  for (int i = 0; i < 64; ++i) bits |= uint64_t{p[i] != 0} << i;
  return bits;
}
inline void store_bf16(uint16_t* p, F x) {
  const U word = reinterpret_cast<U>(x);
  const U rounded = (word + ((word >> 16) & 1) + 0x7fff) >> 16;
  const U quiet = (word | 0x400000) >> 16;
  const U nan = reinterpret_cast<U>(x != x);
  const U result = (nan & quiet) | (~nan & rounded);
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint16_t>(result[i]);
}
inline void store_f16(uint16_t* p, F x) {
  for (int i = 0; i < kLanes; ++i) p[i] = scalar_to_f16(x[i]);
}

inline void transpose(F (&r)[kLanes]) {
  const F a = r[0], b = r[1], c = r[2], d = r[3];
  for (int i = 0; i < kLanes; ++i) r[i] = F{a[i], b[i], c[i], d[i]};
}

inline F load_quads(const float* const (&p)[kLanes / 4]) { return load(p[0]); }
inline void store_quads(float* const (&p)[kLanes / 4], F x) { store(p[0], x); }
inline void transpose_quads(F (&r)[4]) { transpose(r); }
inline F sums(F (&r)[kLanes]) {
  transpose(r);
  return (r[0] + r[2]) + (r[1] + r[3]);
}
inline float lane_sum(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float largest_lane(F x) {
  const float even = x[0] > x[2] ? x[0] : x[2], odd = x[1] > x[3] ? x[1] : x[3];
  return even > odd ? even : odd;
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
