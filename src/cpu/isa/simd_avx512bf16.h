// AVX-512 with AVX512_BF16, AVX512_VNNI and AVX512_VBMI: the words of AVX-512, products of bfloat16 pairs and of bytes, and
// tables of bytes. See simd.h for what each word means.
#pragma once

#include "cpu/isa/simd_avx512.h"

#define POLYHEAD_HAS_BF16_DOT 1
#define POLYHEAD_HAS_INT8_DOT 1
#define POLYHEAD_HAS_BYTE_TABLE 1

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

inline F dot_bf16(F acc, F a, F b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
inline F even_bf16(F word) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(word), 16)); }
inline F odd_bf16(F word) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(word), _mm512_set1_epi32(-0x10000)));
}
inline F join_bf16(F even, F odd) {
  const I low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
  return _mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(low, _mm512_castps_si512(odd), _mm512_set1_epi32(-0x10000), 0xf8));
}
inline void interleave_bf16(F (&words)[2], const uint16_t* even, const uint16_t* odd) {
  const __m512i e = _mm512_loadu_si512(even), o = _mm512_loadu_si512(odd);
  const __m512i low = _mm512_unpacklo_epi16(e, o), high = _mm512_unpackhi_epi16(e, o);
  const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0),
                second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  words[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi64(low, first, high));
  words[1] = _mm512_castsi512_ps(_mm512_permutex2var_epi64(low, second, high));
}
inline F join_halves_bf16(F first, F second) { return reinterpret_cast<F>(_mm512_cvtne2ps_pbh(second, first)); }
inline F pair_bf16(F even, F odd) {
  // cvtne2ps puts the 16 even values below the 16 odd ones; the permutation takes them in turn.
  const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves));
}

class NearestBf16 {
 public:
  F round(F x) const { return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), half_)); }
  F value(F rounded) const { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(rounded), upper_)); }
  F join(F even, F odd) const {
    return _mm512_castsi512_ps(
        _mm512_mask_permutexvar_epi16(_mm512_castps_si512(odd), lower_, order_, _mm512_castps_si512(even)));
  }

 private:
  __m512i half_ = _mm512_set1_epi32(0x8000), upper_ = _mm512_set1_epi32(-0x10000);
  __m512i order_ = _mm512_set_epi16(31, 31, 29, 29, 27, 27, 25, 25, 23, 23, 21, 21, 19, 19, 17, 17, 15, 15, 13, 13, 11,
                                    11, 9, 9, 7, 7, 5, 5, 3, 3, 1, 1);
  __mmask32 lower_ = 0x55555555;
};

inline I dot_int8(I acc, I a, I b) { return _mm512_dpbusd_epi32(acc, a, b); }
inline I load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline I load_bytes_first(const uint8_t* p, int n) { return _mm512_maskz_loadu_epi8((uint64_t{1} << n) - 1, p); }
inline void store_low_bytes(uint8_t* p, I x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
inline void store_int(int32_t* p, I x) { _mm512_storeu_si512(p, x); }
inline I round_to_int(F x) { return _mm512_cvtps_epi32(x); }
inline void interleave_bytes(I (&r)[4]) {
  const I low = _mm512_unpacklo_epi8(r[0], r[1]), high = _mm512_unpackhi_epi8(r[0], r[1]);
  const I low_2 = _mm512_unpacklo_epi8(r[2], r[3]), high_2 = _mm512_unpackhi_epi8(r[2], r[3]);
  r[0] = _mm512_unpacklo_epi16(low, low_2);
  r[1] = _mm512_unpackhi_epi16(low, low_2);
  r[2] = _mm512_unpacklo_epi16(high, high_2);
  r[3] = _mm512_unpackhi_epi16(high, high_2);
}

// x has each byte twice, side by side: the lower becomes the table's low byte, the other its high one. vpermi2b looks at 7 bits.
inline I look_up(I x, __mmask64 lower, const uint8_t* table, I sign) {
  const I low = _mm512_mask2_permutex2var_epi8(_mm512_load_si512(table), x, lower, _mm512_load_si512(table + 64));
  const I both =
      _mm512_mask2_permutex2var_epi8(_mm512_load_si512(table + 128), low, lower << 1, _mm512_load_si512(table + 192));
  return _mm512_ternarylogic_epi32(both, x, sign, 0xf8);  // both | (x & sign)
}
inline F pairs_from_table(const uint8_t* p, const uint8_t* table) {
  alignas(64) static constexpr uint8_t kTwice[64] = {0,  0,  1,  1,  2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,
                                                     8,  8,  9,  9,  10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15,
                                                     16, 16, 17, 17, 18, 18, 19, 19, 20, 20, 21, 21, 22, 22, 23, 23,
                                                     24, 24, 25, 25, 26, 26, 27, 27, 28, 28, 29, 29, 30, 30, 31, 31};
  const I bytes = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const I twice = _mm512_permutexvar_epi8(_mm512_load_si512(kTwice), bytes);
  return _mm512_castsi512_ps(look_up(twice, 0x5555555555555555, table, _mm512_set1_epi16(-0x8000)));
}
inline F floats_from_table(const uint8_t* p, const uint8_t* table) {
  alignas(64) static constexpr uint8_t kTwice[64] = {
      0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 2,  2,  0, 0, 3,  3,  0, 0, 4,  4,  0, 0, 5,  5,  0, 0, 6,  6,  0, 0, 7,  7,
      0, 0, 8, 8, 0, 0, 9, 9, 0, 0, 10, 10, 0, 0, 11, 11, 0, 0, 12, 12, 0, 0, 13, 13, 0, 0, 14, 14, 0, 0, 15, 15};
  const I bytes = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const I twice = _mm512_maskz_permutexvar_epi8(0xcccccccccccccccc, _mm512_load_si512(kTwice), bytes);
  return _mm512_castsi512_ps(look_up(twice, 0x4444444444444444, table, _mm512_set1_epi32(INT32_MIN)));
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
