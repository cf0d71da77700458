// AVX-512 with AVX512_BF16: the words of AVX-512, and products of bfloat16 pairs. See simd.h for what each word means.
#pragma once

#include "cpu/isa/simd_avx512.h"

#define POLYHEAD_HAS_BF16_DOT 1

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
inline F pair_bf16(F even, F odd) {
  // cvtne2ps puts the 16 even values below the 16 odd ones; the permutation takes them in turn.
  const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves));
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
