// The CUDA kernels.
#pragma once

#include "contract/kernel.h"

namespace polyhead {

// For GPUs of compute capability 8.0 and up: forward and backward in float32, bfloat16 and float16.
extern const Kernel kCudaSm80;

}  // namespace polyhead
