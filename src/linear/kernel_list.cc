// The one place that names the backends of src/linear.
#include "contract/linear.h"
#include "core/choose.h"
#include "cpu/linear/kernels.h"
#include "reference/linear.h"

namespace polyhead::linear {
std::span<const Kernel* const> kernel_list() {
  static constexpr const Kernel* kKernels[] = {
#if defined(__x86_64__)
    &kCpuAvx512Bf16,
    &kCpuAvx512,
    &kCpuAvx2,
#endif
    &kCpuGeneric,
    &kReference,
  };
  return kKernels;
}

const Kernel* find_kernel(std::string_view name) {
  for (const Kernel* kernel : kernel_list()) {
    if (name == kernel->name) return kernel;
  }
  return nullptr;
}

Result<const Kernel*> choose_kernel(DType dtype, std::string_view name) {
  return choose_asked(kernel_list(), dtype, name);
}

}  // namespace polyhead::linear
