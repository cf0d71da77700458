// The CPU's kernels, one for each instruction set.
#pragma once

#include "contract/kernel.h"

namespace polyhead {

extern const Kernel kCpuGeneric;
#if defined(__x86_64__)
extern const Kernel kCpuAvx512Bf16, kCpuAvx512, kCpuAvx2;
#endif
}  // namespace polyhead
