// AVX-512 with AVX512_BF16, and AMX's tile registers. See simd.h for what each word means.
//
// In assembler, because GCC's intrinsics do not tell the compiler that a tile load reads memory, and leave a store of
// what is loaded behind it.
#pragma once

#include "cpu/isa/simd_avx512bf16.h"

#define POLYHEAD_HAS_TMM 1

// Whose epilogues and norms these are, and whose attention of few queries and of tiny heads: cores with these registers multiply
// pairs of bfloat16 in vectors half as fast as floats.
#define POLYHEAD_ISA_OF_ROWS avx512bf16
#define POLYHEAD_ISA_OF_FEW avx512

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Registers keep nothing across calls of others on the same thread: a host may use them too (oneDNN does).
class TmmInUse {
 public:
  TmmInUse() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    static_assert(sizeof shapes == 64);
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~TmmInUse() { asm volatile("tilerelease"); }
  TmmInUse(const TmmInUse&) = delete;
};

// Meanwhile vectors take subnormal numbers as 0, as tdpbf16ps does. What is computed meanwhile stands in a function of its own: the
// compiler would move it.
class SubnormalsAsZero {
 public:
  SubnormalsAsZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZero); }
  ~SubnormalsAsZero() { _mm_setcsr(before_); }
  SubnormalsAsZero(const SubnormalsAsZero&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  unsigned before_;
};

// What a tile load reads. To clang, which has no such operand, volatile assembler reads all memory anyway.
#ifdef __clang__
using Anything = char;
#else
using Anything = char[];
#endif

template <int kTo>
inline __attribute__((always_inline)) void tmm_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTo));
}
template <int kTo, bool kOnce = false>
inline __attribute__((always_inline)) void tmm_load(const void* p, ptrdiff_t stride) {
  if constexpr (kOnce) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(kTo), "r"(p), "r"(4 * stride),
                 "m"(*static_cast<const Anything*>(p)));
  } else {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTo), "r"(p), "r"(4 * stride),
                 "m"(*static_cast<const Anything*>(p)));
  }
}
template <int kFrom>
inline __attribute__((always_inline)) void tmm_store(float* p, ptrdiff_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kFrom), "r"(p), "r"(4 * stride) : "memory");
}
template <int kSum, int kA, int kB>
inline __attribute__((always_inline)) void tmm_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
