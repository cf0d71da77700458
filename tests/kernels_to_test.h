// The kernels of this build, or the one that POLYHEAD_TEST_KERNEL names.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include "contract/kernel.h"

namespace polyhead::testing {

inline std::vector<const Kernel*> kernels_to_test() {
  const char* only = std::getenv("POLYHEAD_TEST_KERNEL");
  std::vector<const Kernel*> list;
  for (const Kernel* kernel : kernel_list()) {
    if (!only || std::string(only) == kernel->name) list.push_back(kernel);
  }
  return list;
}

}  // namespace polyhead::testing
