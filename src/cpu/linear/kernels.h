// The CPU's kernels of src/linear, one for each instruction set.
#pragma once

#include "contract/linear.h"

namespace polyhead::linear {

extern const Kernel kCpuGeneric;
#if defined(__x86_64__)
extern const Kernel kCpuAvx512Bf16, kCpuAvx512, kCpuAvx2;
#endif

}  // namespace polyhead::linear
