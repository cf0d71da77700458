// The CPU's kernels, one for each instruction set.
#pragma once

#include "contract/kernel.h"
#include "cpu/isa/list.h"

namespace polyhead {

extern const Kernel kCpuKernels[cpu::kNumIsas];  // in the list's order

}  // namespace polyhead
