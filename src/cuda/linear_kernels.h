// The kernels of src/cuda for products, epilogues and norms: kernel_list.cc names them.
#pragma once

#include "contract/linear.h"

namespace polyhead::linear {

extern const Kernel kCudaSm80;

}  // namespace polyhead::linear
