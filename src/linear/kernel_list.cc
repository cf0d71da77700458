// The one place that names the backends of src/linear.
#include <array>

#include "contract/linear.h"
#include "contract/where.h"
#include "core/choose.h"
#include "cpu/isa/order.h"
#include "cpu/linear/kernels.h"
#include "reference/linear.h"

namespace polyhead::linear {
std::span<const Kernel* const> kernel_list() {
  static const auto kKernels = [] {
    std::array<const Kernel*, cpu::kNumIsas + 1> list;
    for (int i = 0; i < cpu::kNumIsas; ++i) list[i] = &kCpuKernels[static_cast<int>(cpu::isa_order().isas[i])];
    list.back() = &kReference;
    return list;
  }();
  return kKernels;
}

const Kernel* find_kernel(std::string_view name) {
  for (const Kernel* kernel : kernel_list()) {
    if (name == kernel->name) return kernel;
  }
  return nullptr;
}

Result<const Kernel*> choose_kernel(DType dtype, std::string_view name, Device device) {
  if (device != Device::kCpu) return no_kernel_for(device);
  // One that attention knows may have no products.
  return choose_asked(kernel_list(), dtype, name, "the kernels with matrix products");
}

}  // namespace polyhead::linear
