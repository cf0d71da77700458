// The CPU's kernels, one for each instruction set.
#pragma once

#include "contract/kernel.h"
#include "cpu/isa/list.h"

namespace polyhead {

extern const Kernel kCpuKernels[cpu::kNumIsas];  // in the list's order
#ifdef __x86_64__
extern const Kernel kAmxFloat32;  // of float32 and float16, in planes (cpu/isa/planes.h)
#endif

}  // namespace polyhead
