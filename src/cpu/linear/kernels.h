// The CPU's kernels of src/linear, one for each instruction set.
#pragma once

#include "contract/linear.h"
#include "cpu/isa/list.h"

namespace polyhead::linear {

extern const Kernel kCpuKernels[cpu::kNumIsas];  // in the list's order

}  // namespace polyhead::linear
