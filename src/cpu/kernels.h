// The CPU's kernels, one for each instruction set, and how fast this machine can be at best.
#pragma once

#include "attention/kernel.h"

namespace polyhead {

extern const Kernel kCpuGeneric;
#if defined(__x86_64__)
extern const Kernel kCpuAvx512Bf16, kCpuAvx512, kCpuAvx2;
#endif

namespace cpu {

// Multiply-adds of one thread on registers alone, GFLOP/s, in the best kernel's words: float32, or bfloat16 (float32's
// where the machine has no bfloat16 product). The best of several runs within about `seconds`.
double measure_peak_gflops(DType dtype, double seconds = 0.05);

// Bytes that one thread reads from memory in a second, GB/s, over a buffer far larger than the caches.
double measure_read_gbytes(double seconds = 0.2);

}  // namespace cpu
}  // namespace polyhead
