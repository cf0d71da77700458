// AVX-512 (F, BW, DQ, VL; with AVX512_BF16 its rounding): 16 lanes. See simd.h for what each word means.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kLanes = 16;
constexpr int kRegisters = 32;
using F = __m512;
using I = __m512i;
using M = __mmask16;

inline void keep_in_register(F& x) { asm volatile("" : "+v"(x)); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(static_cast<M>((1u << n) - 1), p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline void store_first(float* p, F x, int n) { _mm512_mask_storeu_ps(p, static_cast<M>((1u << n) - 1), x); }
inline F broadcast(float x) { return _mm512_set1_ps(x); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F fms(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }
inline M equal(F a, F b);
inline F select(M m, F a, F b);
inline F divide(F x, F divisor, F reciprocal) {
  const F quotient = x * reciprocal;
  const F error = fma(broadcast(0.0f) - quotient, divisor, x);  // NaN where the quotient is inf
  return select(equal(error, error), fma(error, reciprocal, quotient), quotient);
}
inline F maximum(F a, F b) { return _mm512_max_ps(a, b); }
inline F round_to_even(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F absolute(F x) { return _mm512_abs_ps(x); }

inline M less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline M equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline M outside(F x, float limit) {
  return _mm512_cmpgt_epu32_mask(_mm512_castps_si512(x), _mm512_castps_si512(_mm512_set1_ps(limit)));
}
inline M both(M a, M b) { return a & b; }
inline M either(M a, M b) { return a | b; }
inline M negate(M a) { return static_cast<M>(~a); }
inline F select(M m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }
inline bool any(M m) { return m != 0; }
inline uint32_t bits(M m) { return m; }
inline M mask_from_bits(uint32_t b) { return static_cast<M>(b); }

inline F scale_by_power(F x, F n, F y) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(y, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), x, n);
}
inline F scale_by_small_power(F x, F n, F y) { return scale_by_power(x, n, y); }
#define POLYHEAD_HAS_FRACTION 1
inline F fraction(F y) { return _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline F scale_by_floor(F x, F y) { return scale_by_power(x, y, y); }  // vscalefps takes the floor itself
inline F scale_by_floor_flushed(F x, F y) { return _mm512_scalef_ps(x, y); }
inline F mantissa(F x) { return _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src); }
inline F exponent(F x) { return _mm512_getexp_ps(x); }

inline I broadcast_int(int32_t x) { return _mm512_set1_epi32(x); }
inline I iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline I load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
inline I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
inline I xor_int(I a, I b) { return _mm512_xor_si512(a, b); }
inline I and_int(I a, I b) { return _mm512_and_si512(a, b); }
template <int kBits>
inline I shift_right(I a) {
  return _mm512_srli_epi32(a, kBits);
}
inline M less_int(I a, I b) { return _mm512_cmplt_epi32_mask(a, b); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline void multiply_wide(I a, I b, I& high, I& low) {
  const I even = _mm512_mul_epu32(a, b);
  const I odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);  // `b` is a broadcast
  low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
}

inline F load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline F load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline F load_bf16_first(const uint16_t* p, int n) {
  const __m256i half = _mm256_maskz_loadu_epi16(static_cast<M>((1u << n) - 1), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline F load_f16_first(const uint16_t* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(static_cast<M>((1u << n) - 1), p));
}
inline F load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#define POLYHEAD_HAS_INT4 1
inline F load_int4(const uint8_t* p) {
  const I eights = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const I each = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), eights);
  const I low = _mm512_srlv_epi32(each, _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28));
  const F numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  return _mm512_permutexvar_ps(low, numbers);  // looks at 4 bits
}
inline F load_bool(const uint8_t* p) {  // 0 where the byte is 0, else 1
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_maskz_mov_ps(_mm_test_epi8_mask(bytes, bytes), _mm512_set1_ps(1.0f));
}
inline uint64_t nonzero_bytes(const uint8_t* p) {
  const I bytes = _mm512_loadu_si512(p);
  return _mm512_test_epi8_mask(bytes, bytes);
}
inline __m256i to_bf16(F x) {
#ifdef __AVX512BF16__
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
#else
  const I word = _mm512_castps_si512(x);
  const I lsb = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
  const I rounded = _mm512_add_epi32(word, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
  const M nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const I quiet = _mm512_or_si512(word, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
#endif
}
inline void store_bf16(uint16_t* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }
inline void store_f16(uint16_t* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// Four vectors as 4 x 4 numbers in each 128 bits.
__attribute__((always_inline)) inline void transpose_quads(F* r) {
  const F a = _mm512_unpacklo_ps(r[0], r[1]), b = _mm512_unpackhi_ps(r[0], r[1]);
  const F c = _mm512_unpacklo_ps(r[2], r[3]), d = _mm512_unpackhi_ps(r[2], r[3]);
  r[0] = _mm512_shuffle_ps(a, c, 0x44);
  r[1] = _mm512_shuffle_ps(a, c, 0xee);
  r[2] = _mm512_shuffle_ps(b, d, 0x44);
  r[3] = _mm512_shuffle_ps(b, d, 0xee);
}

__attribute__((always_inline)) inline void transpose(F (&r)[kLanes]) {  // in registers
  F t[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    const F a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
    const F c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm512_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    const F a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
    const F c = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    r[i] = _mm512_shuffle_f32x4(a, b, 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(a, b, 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(c, d, 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
}

// Loads 16 rows and transposes them: halves of rows i and i + 8 meet on the way from memory, which leaves 48 shuffles of 64.
#define POLYHEAD_HAS_LOAD_TRANSPOSED 1
__attribute__((always_inline)) inline void load_transposed(F (&r)[kLanes], const char* const (&p)[kLanes],
                                                           int64_t offset) {
  const I first = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), second = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  const auto half = [&](int i) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p[i] + offset)); };
#pragma GCC unroll 2
  for (int columns = 0; columns < kLanes; columns += 8, offset += 32) {
    F x[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) x[i] = _mm512_insertf32x8(_mm512_castps256_ps512(half(i)), half(i + 8), 1);
    transpose_quads(x);
    transpose_quads(x + 4);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d low = _mm512_castps_pd(x[i]), high = _mm512_castps_pd(x[i + 4]);
      r[columns + i] = _mm512_castpd_ps(_mm512_permutex2var_pd(low, first, high));
      r[columns + i + 4] = _mm512_castpd_ps(_mm512_permutex2var_pd(low, second, high));
    }
  }
}

inline F load_quads(const float* const (&p)[kLanes / 4]) {
  F x = _mm512_castps128_ps512(_mm_loadu_ps(p[0]));
  x = _mm512_insertf32x4(x, _mm_loadu_ps(p[1]), 1);
  x = _mm512_insertf32x4(x, _mm_loadu_ps(p[2]), 2);
  return _mm512_insertf32x4(x, _mm_loadu_ps(p[3]), 3);
}
inline void store_quads(float* const (&p)[kLanes / 4], F x) {
  _mm_storeu_ps(p[0], _mm512_castps512_ps128(x));
  _mm_storeu_ps(p[1], _mm512_extractf32x4_ps(x, 1));
  _mm_storeu_ps(p[2], _mm512_extractf32x4_ps(x, 2));
  _mm_storeu_ps(p[3], _mm512_extractf32x4_ps(x, 3));
}
inline F sums(F (&r)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    const F a = _mm512_unpacklo_ps(r[i], r[i + 1]) + _mm512_unpackhi_ps(r[i], r[i + 1]);
    const F b = _mm512_unpacklo_ps(r[i + 2], r[i + 3]) + _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
    r[i] = _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee);
  }
  const F low = _mm512_shuffle_f32x4(r[0], r[4], 0x88) + _mm512_shuffle_f32x4(r[0], r[4], 0xdd);
  const F high = _mm512_shuffle_f32x4(r[8], r[12], 0x88) + _mm512_shuffle_f32x4(r[8], r[12], 0xdd);
  return _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd);
}
inline float lane_sum(F x) { return _mm512_reduce_add_ps(x); }
inline float largest_lane(F x) { return _mm512_reduce_max_ps(x); }

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
