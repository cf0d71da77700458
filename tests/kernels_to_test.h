// A device's kernels of this build, or the one that POLYHEAD_TEST_KERNEL names. Where a sanitizer alone looks on, cpu_avx512
// is left out beside cpu_avx512bf16, which differs from it in the words of bfloat16 alone.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "contract/kernel.h"
#include "left_out.h"
#include "polyhead/kernels.h"
#include "sanitizer.h"

namespace polyhead::testing {

inline std::vector<const Kernel*> kernels_to_test(Device device = Device::kCpu) {
  const char* only = std::getenv("POLYHEAD_TEST_KERNEL");
  const std::vector<std::string> usable = kernels();
  const bool has_nearest = std::find(usable.begin(), usable.end(), "cpu_avx512bf16") != usable.end();
  std::vector<const Kernel*> list;
  for (const Kernel* kernel : kernel_list()) {
    const std::string name = kernel->name;
    if (kernel->device != device) continue;  // its tensors lie elsewhere
    if (only != nullptr && name != only) continue;
    if (only == nullptr && memory_alone() && has_nearest && name == "cpu_avx512") {
      left_out().add("cpu_avx512: cpu_avx512bf16 differs in the words of bfloat16 alone");
      continue;
    }
    list.push_back(kernel);
  }
  return list;
}

}  // namespace polyhead::testing
