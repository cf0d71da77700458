// The one place that names the backends of src/linear.
#include <algorithm>
#include <array>
#include <iterator>

#include "contract/linear.h"
#include "core/choose.h"
#include "cpu/isa/order.h"
#include "cpu/linear/kernels.h"
#include "reference/linear.h"
#ifdef POLYHEAD_CUDA_KERNELS
#include "cuda/linear_kernels.h"
#endif

namespace polyhead::linear {

#ifdef POLYHEAD_EXTRA_PRODUCT_KERNEL
extern const Kernel POLYHEAD_EXTRA_PRODUCT_KERNEL;  // of a test: tests/cpu/amx_twin/kernel.cc
#endif
#ifdef POLYHEAD_EXTRA_FLOAT32_PRODUCT_KERNEL
extern const Kernel POLYHEAD_EXTRA_FLOAT32_PRODUCT_KERNEL;
#endif

std::span<const Kernel* const> kernel_list() {
  static constexpr const Kernel* kOthers[] = {
#ifdef __x86_64__
      &kAmxFloat32,
#endif
#ifdef POLYHEAD_EXTRA_PRODUCT_KERNEL
      &POLYHEAD_EXTRA_PRODUCT_KERNEL,
#endif
#ifdef POLYHEAD_EXTRA_FLOAT32_PRODUCT_KERNEL
      &POLYHEAD_EXTRA_FLOAT32_PRODUCT_KERNEL,
#endif
#ifdef POLYHEAD_CUDA_KERNELS
      &kCudaSm80,
#endif
      &kReference,
  };
  static const auto kKernels = [] {
    std::array<const Kernel*, cpu::kNumIsas + std::size(kOthers)> list;
    for (int i = 0; i < cpu::kNumIsas; ++i) list[i] = &kCpuKernels[static_cast<int>(cpu::isa_order().isas[i])];
    std::copy(std::begin(kOthers), std::end(kOthers), list.begin() + cpu::kNumIsas);
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
  // One that attention knows may have no products.
  return choose_on(device, kernel_list(), dtype, name, "the kernels with matrix products");
}

}  // namespace polyhead::linear
