// Runs a grid of a kernel, block after block, and says what is wrong with it.
#pragma once

#include <vector>

#include "device_memory.h"
#include "program.h"
#include "warp.h"

namespace cuda_sim {

struct Shape {
  Dim3 grid, block;
  int dynamic_shared_bytes = 0;
};

// Throws Fault at the first thing that is wrong: what a machine would do by chance is wrong. `parameters` are laid out
// as the kernel declares them.
void run(const Module& module, const Kernel& kernel, const Shape& shape, const std::vector<unsigned char>& parameters,
         DeviceMemory& memory, Counters& counters);

}  // namespace cuda_sim
