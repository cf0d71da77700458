// Which instruction sets this machine has: CPU and operating system together. Compiled without ISA flags.
#pragma once

namespace polyhead::cpu {

struct Isa {
  bool avx2 = false;        // AVX2, FMA and F16C
  bool avx512 = false;      // avx2, and AVX-512 F, BW, DQ, VL
  bool avx512bf16 = false;  // avx512, and AVX512_BF16
};

// Detected once.
const Isa& isa();

}  // namespace polyhead::cpu
