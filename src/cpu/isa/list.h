// The instruction sets that the CPU's kernels are compiled for. Kernels, their tables, detection and the kernel lists
// come from here: to add one, add a row, its flags to cmake/per_isa.cmake and its words as simd_<name>.h.
#pragma once

// ROW(name, features), best first: kernels are called cpu_<name>. `features`: all that the flags let the compiler use,
// joined by | (tests/cpu/isa_test.cc asks the compiler); a CPU without one of them does not run the kernel.
#if defined(__x86_64__)
#define POLYHEAD_ISAS(ROW)                               \
  ROW(amx, POLYHEAD_AVX512_BF16 | kAMX_TILE | kAMX_BF16) \
  ROW(avx512bf16, POLYHEAD_AVX512_BF16)                  \
  ROW(avx512, POLYHEAD_X86_64_V4)                        \
  ROW(avx2, POLYHEAD_AVX2)                               \
  ROW(generic, 0)
#elif defined(__aarch64__)
#define POLYHEAD_ISAS(ROW)                    \
  ROW(neon, 0) /* part of the architecture */ \
  ROW(generic, 0)
#else
#define POLYHEAD_ISAS(ROW) ROW(generic, 0)
#endif

#define POLYHEAD_AVX2 (kSSE3 | kSSSE3 | kSSE4_1 | kSSE4_2 | kPOPCNT | kXSAVE | kAVX | kF16C | kFMA | kAVX2)
#define POLYHEAD_X86_64_V4                                                                                  \
  (POLYHEAD_AVX2 | kCX16 | kLAHF_SAHF | kLZCNT | kMOVBE | kBMI | kBMI2 | kAVX512F | kAVX512BW | kAVX512CD | \
   kAVX512DQ | kAVX512VL)
#define POLYHEAD_AVX512_BF16 (POLYHEAD_X86_64_V4 | kAVX512VNNI | kAVX512VBMI | kAVX512BF16)

// ROW(name, leaf, subleaf, register, bit of CPUID, registers that the system must save): Intel SDM volume 2A; leaf
// 0x80000001: AMD APM volume 3. Names are the compilers' (__AVX2__), where they have one.
#define POLYHEAD_X86_FEATURES(ROW)             \
  ROW(SSE3, 1, 0, ecx, 0, kXmm)                \
  ROW(SSSE3, 1, 0, ecx, 9, kXmm)               \
  ROW(FMA, 1, 0, ecx, 12, kYmm)                \
  ROW(CX16, 1, 0, ecx, 13, kNone)              \
  ROW(SSE4_1, 1, 0, ecx, 19, kXmm)             \
  ROW(SSE4_2, 1, 0, ecx, 20, kXmm)             \
  ROW(MOVBE, 1, 0, ecx, 22, kNone)             \
  ROW(POPCNT, 1, 0, ecx, 23, kNone)            \
  ROW(XSAVE, 1, 0, ecx, 26, kNone)             \
  ROW(AVX, 1, 0, ecx, 28, kYmm)                \
  ROW(F16C, 1, 0, ecx, 29, kYmm)               \
  ROW(BMI, 7, 0, ebx, 3, kNone)                \
  ROW(AVX2, 7, 0, ebx, 5, kYmm)                \
  ROW(BMI2, 7, 0, ebx, 8, kNone)               \
  ROW(AVX512F, 7, 0, ebx, 16, kZmm)            \
  ROW(AVX512DQ, 7, 0, ebx, 17, kZmm)           \
  ROW(AVX512CD, 7, 0, ebx, 28, kZmm)           \
  ROW(AVX512BW, 7, 0, ebx, 30, kZmm)           \
  ROW(AVX512VL, 7, 0, ebx, 31, kZmm)           \
  ROW(AVX512VBMI, 7, 0, ecx, 1, kZmm)          \
  ROW(AVX512VNNI, 7, 0, ecx, 11, kZmm)         \
  ROW(AMX_BF16, 7, 0, edx, 22, kTmm)           \
  ROW(AMX_TILE, 7, 0, edx, 24, kTmm)           \
  ROW(AVX512BF16, 7, 1, eax, 5, kZmm)          \
  ROW(LAHF_SAHF, 0x80000001, 0, ecx, 0, kNone) \
  ROW(LZCNT, 0x80000001, 0, ecx, 5, kNone)

namespace polyhead::cpu {

#define POLYHEAD_ISA_ENUMERATOR(name, features) name,
enum class Isa { POLYHEAD_ISAS(POLYHEAD_ISA_ENUMERATOR) };
#undef POLYHEAD_ISA_ENUMERATOR

constexpr int kNumIsas = static_cast<int>(Isa::generic) + 1;

}  // namespace polyhead::cpu
