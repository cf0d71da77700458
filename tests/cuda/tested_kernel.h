// What a test of PTX runs it on: the interpreter, or, compiled with POLYHEAD_ON_DEVICE, a GPU, if there is one.
#pragma once

#include "one_kernel.h"
#ifdef POLYHEAD_ON_DEVICE
#include "device_kernel.h"
#endif

namespace cuda_sim {

#ifdef POLYHEAD_ON_DEVICE
using TestedKernel = DeviceKernel;
inline std::string why_not_here() { return Driver::why_not(); }
inline bool is_hopper() { return Driver::get().capability == 90; }
#else
using TestedKernel = OneKernel;
inline std::string why_not_here() { return ""; }
inline bool is_hopper() { return true; }
#endif

}  // namespace cuda_sim
