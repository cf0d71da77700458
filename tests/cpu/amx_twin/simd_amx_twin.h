// The words of simd_amx.h in software, over AVX2's: pairs of bfloat16, and registers of 16 x 16 words as arrays. What the
// hardware computes but for subnormal numbers, which it takes as 0.
#pragma once

#include "cpu/isa/simd_avx2.h"

#define POLYHEAD_HAS_BF16_DOT 1
#define POLYHEAD_HAS_FRACTION 1
#define POLYHEAD_HAS_TMM 1
#define POLYHEAD_ISA_OF_ROWS avx2
#define POLYHEAD_ISA_OF_FEW avx2

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

inline F even_bf16(F word) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(word), 16)); }
inline F odd_bf16(F word) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(word), _mm256_set1_epi32(-0x10000)));
}
inline F join_bf16(F even, F odd) {
  const I low = _mm256_srli_epi32(_mm256_castps_si256(even), 16);
  return _mm256_castsi256_ps(_mm256_or_si256(low, _mm256_castps_si256(odd_bf16(odd))));
}
inline void interleave_bf16(F (&words)[2], const uint16_t* even, const uint16_t* odd) {
  for (int i = 0; i < 2; ++i) words[i] = join_bf16(load_bf16(even + i * kLanes), load_bf16(odd + i * kLanes));
}
inline F pair_bf16(F even, F odd) {
  uint16_t halves[2][kLanes];
  store_bf16(halves[0], even);
  store_bf16(halves[1], odd);
  return join_bf16(load_bf16(halves[0]), load_bf16(halves[1]));
}
inline F join_halves_bf16(F first, F second) {
  uint16_t halves[2 * kLanes];
  store_bf16(halves, first);
  store_bf16(halves + kLanes, second);
  return load(reinterpret_cast<const float*>(halves));
}
inline F dot_bf16(F acc, F a, F b) { return fma(even_bf16(a), even_bf16(b), fma(odd_bf16(a), odd_bf16(b), acc)); }

struct NearestBf16 {
  F round(F x) const {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x8000)));
  }
  F value(F rounded) const { return odd_bf16(rounded); }
  F join(F even, F odd) const { return join_bf16(even, odd); }
};

inline F fraction(F y) {
  const F f = y - _mm256_floor_ps(y);
  return select(equal(absolute(y), broadcast(__builtin_inff())), broadcast(0.0f), f);
}
inline F scale_by_floor(F x, F y) { return scale_by_power(x, _mm256_floor_ps(y), y); }
inline F scale_by_floor_flushed(F x, F y) { return scale_by_floor(x, y); }

struct SubnormalsAsZero {
  SubnormalsAsZero() {}  // they are not: see above
};

struct TmmRegister {
  alignas(32) float row[16][16];
};
inline thread_local TmmRegister tmm_registers[8];
inline thread_local bool tmm_in_use = false;

// A register that nothing was put into since the last task holds NaN, and without a TmmInUse nothing works.
class TmmInUse {
 public:
  TmmInUse() {
    if (tmm_in_use) __builtin_trap();
    tmm_in_use = true;
    __builtin_memset(tmm_registers, 0xff, sizeof tmm_registers);
  }
  ~TmmInUse() { tmm_in_use = false; }
  TmmInUse(const TmmInUse&) = delete;
};

inline TmmRegister& tmm_register(int t) {
  if (!tmm_in_use) __builtin_trap();
  return tmm_registers[t];
}

template <int kTo>
inline void tmm_zero() {
  __builtin_memset(&tmm_register(kTo), 0, sizeof(TmmRegister));
}
template <int kTo, bool kOnce = false>
inline void tmm_load(const void* p, ptrdiff_t stride) {
  TmmRegister& to = tmm_register(kTo);
  for (int i = 0; i < 16; ++i) __builtin_memcpy(to.row[i], static_cast<const char*>(p) + 4 * i * stride, 64);
}
template <int kFrom>
inline void tmm_store(float* p, ptrdiff_t stride) {
  const TmmRegister& from = tmm_register(kFrom);
  for (int i = 0; i < 16; ++i) __builtin_memcpy(p + i * stride, from.row[i], 64);
}

// Even and odd elements are summed each by themselves, then added to what was there.
template <int kSum, int kA, int kB>
inline void tmm_dot_bf16() {
  const TmmRegister &a = tmm_register(kA), &b = tmm_register(kB);
  TmmRegister& to = tmm_register(kSum);
  for (int i = 0; i < 16; ++i) {
    for (int v = 0; v < 16; v += kLanes) {
      F even = broadcast(0.0f), odd = broadcast(0.0f);
      for (int u = 0; u < 16; ++u) {
        const F a_u = broadcast(a.row[i][u]), b_u = load(&b.row[u][v]);
        even = fma(even_bf16(a_u), even_bf16(b_u), even);
        odd = fma(odd_bf16(a_u), odd_bf16(b_u), odd);
      }
      store(&to.row[i][v], load(&to.row[i][v]) + (even + odd));
    }
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
