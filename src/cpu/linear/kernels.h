// The CPU's kernels of src/linear, one for each instruction set.
#pragma once

#include "contract/linear.h"
#include "cpu/isa/list.h"

namespace polyhead::linear {

extern const Kernel kCpuKernels[cpu::kNumIsas];  // in the list's order
#ifdef __x86_64__
extern const Kernel kAmxFloat32;  // products of vectors beside attention in planes
#endif

}  // namespace polyhead::linear
