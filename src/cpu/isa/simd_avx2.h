// AVX2 with FMA and F16C: 8 lanes. See simd.h for what each word means.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kLanes = 8;
constexpr int kRegisters = 16;
using F = __m256;
using I = __m256i;
using M = __m256;  // all bits of a lane set, or none

inline I lane_index() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline I first_lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane_index()); }

inline void keep_in_register(F& x) { asm volatile("" : "+x"(x)); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline F load_first(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline void store_first(float* p, F x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
inline F broadcast(float x) { return _mm256_set1_ps(x); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F fms(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }
inline M equal(F a, F b);
inline F select(M m, F a, F b);
inline F divide(F x, F divisor, F reciprocal) {
  const F quotient = x * reciprocal;
  const F error = fma(broadcast(0.0f) - quotient, divisor, x);  // NaN where the quotient is inf
  return select(equal(error, error), fma(error, reciprocal, quotient), quotient);
}
inline F maximum(F a, F b) { return _mm256_max_ps(a, b); }
inline F round_to_even(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F absolute(F x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

inline M less(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline M equal(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
inline M outside(F x, float limit) {
  return _mm256_or_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_NLE_UQ),
                      _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ));
}
inline M both(M a, M b) { return _mm256_and_ps(a, b); }
inline M either(M a, M b) { return _mm256_or_ps(a, b); }
inline M negate(M a) { return _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(-1))); }
inline F select(M m, F a, F b) { return _mm256_blendv_ps(b, a, m); }
inline bool any(M m) { return _mm256_movemask_ps(m) != 0; }
inline uint32_t bits(M m) { return static_cast<uint32_t>(_mm256_movemask_ps(m)); }
inline M mask_from_bits(uint32_t b) {
  const I bit = _mm256_sllv_epi32(_mm256_set1_epi32(1), lane_index());
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(b)), bit), bit));
}

inline F scale_by_power(F x, F n, F y) {
  // Two factors, so that every n from -126 to 254 gives a finite power. n is an integer, or NaN, or -inf.
  const M tiny = less(y, _mm256_set1_ps(-126.0f));
  const I e = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(n, _mm256_set1_ps(-126.0f)), _mm256_set1_ps(254.0f)));
  const I half = _mm256_srai_epi32(e, 1);
  const I bias = _mm256_set1_epi32(127);
  const F a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const F b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(e, half), bias), 23));
  return _mm256_andnot_ps(tiny, _mm256_mul_ps(_mm256_mul_ps(x, a), b));
}
inline F scale_by_small_power(F x, F n, F y) {
  const I e = _mm256_cvtps_epi32(_mm256_min_ps(n, _mm256_set1_ps(128.0f)));  // NaN -> 128; of tiny ones anything
  const F power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
  return _mm256_andnot_ps(less(y, _mm256_set1_ps(-126.0f)), _mm256_mul_ps(x, power));
}
inline F mantissa(F x) {
  const I word = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x007fffff));
  return _mm256_castsi256_ps(_mm256_or_si256(word, _mm256_set1_epi32(0x3f800000)));
}
inline F exponent(F x) {
  const I e = _mm256_srli_epi32(_mm256_castps_si256(x), 23);
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(e, _mm256_set1_epi32(255)), _mm256_set1_epi32(127)));
}

inline I broadcast_int(int32_t x) { return _mm256_set1_epi32(x); }
inline I iota() { return lane_index(); }
inline I load_int(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline I add_int(I a, I b) { return _mm256_add_epi32(a, b); }
inline I xor_int(I a, I b) { return _mm256_xor_si256(a, b); }
inline I and_int(I a, I b) { return _mm256_and_si256(a, b); }
template <int kBits>
inline I shift_right(I a) {
  return _mm256_srli_epi32(a, kBits);
}
inline M less_int(I a, I b) { return _mm256_castsi256_ps(_mm256_cmpgt_epi32(b, a)); }
inline F to_float(I a) { return _mm256_cvtepi32_ps(a); }
inline void multiply_wide(I a, I b, I& high, I& low) {
  const I even = _mm256_mul_epu32(a, b);
  const I odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);  // `b` is a broadcast
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}

inline F load_bf16(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
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
inline F load_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline F load_bool(const uint8_t* p) {
  const I bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(bytes, _mm256_setzero_si256())), _mm256_set1_ps(1.0f));
}
inline uint64_t nonzero_bytes(const uint8_t* p) {
  uint64_t zero = 0;
  for (int half = 0; half < 2; ++half) {
    const I bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * half));
    const I equal = _mm256_cmpeq_epi8(bytes, _mm256_setzero_si256());
    zero |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(equal))} << (32 * half);
  }
  return ~zero;
}
inline void store_bf16(uint16_t* p, F x) {
  const I word = _mm256_castps_si256(x);
  const I lsb = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
  const I rounded = _mm256_add_epi32(word, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
  const I quiet = _mm256_or_si256(word, _mm256_set1_epi32(0x400000));
  const F nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const I result = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan));
  const I half = _mm256_srli_epi32(result, 16);
  const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline void store_f16(uint16_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

inline void transpose(F (&r)[kLanes]) {
  F t[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
    const F a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
    const F c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
}

inline F load_quads(const float* const (&p)[kLanes / 4]) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p[0])), _mm_loadu_ps(p[1]), 1);
}
inline void store_quads(float* const (&p)[kLanes / 4], F x) {
  _mm_storeu_ps(p[0], _mm256_castps256_ps128(x));
  _mm_storeu_ps(p[1], _mm256_extractf128_ps(x, 1));
}
inline void transpose_quads(F (&r)[4]) {
  const F a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
  const F c = _mm256_unpacklo_ps(r[2], r[3]), d = _mm256_unpackhi_ps(r[2], r[3]);
  r[0] = _mm256_shuffle_ps(a, c, 0x44);
  r[1] = _mm256_shuffle_ps(a, c, 0xee);
  r[2] = _mm256_shuffle_ps(b, d, 0x44);
  r[3] = _mm256_shuffle_ps(b, d, 0xee);
}
inline F sums(F (&r)[kLanes]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
    const F a = _mm256_unpacklo_ps(r[i], r[i + 1]) + _mm256_unpackhi_ps(r[i], r[i + 1]);
    const F b = _mm256_unpacklo_ps(r[i + 2], r[i + 3]) + _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    r[i] = _mm256_shuffle_ps(a, b, 0x44) + _mm256_shuffle_ps(a, b, 0xee);
  }
  return _mm256_permute2f128_ps(r[0], r[4], 0x20) + _mm256_permute2f128_ps(r[0], r[4], 0x31);
}
inline float lane_sum(F x) {
  __m128 half = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
  half = half + _mm_movehl_ps(half, half);
  return _mm_cvtss_f32(half + _mm_movehdup_ps(half));
}
inline float largest_lane(F x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ps(half, _mm_movehdup_ps(half)));
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
