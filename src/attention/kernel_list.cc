// The one place that names the backends.
#include <algorithm>
#include <array>
#include <iterator>
#include <new>
#include <vector>

#include "contract/kernel.h"
#include "core/choose.h"
#include "cpu/attention/kernels.h"
#include "cpu/isa/order.h"
#include "polyhead/kernels.h"
#include "reference/attention.h"
#ifdef POLYHEAD_CUDA_KERNELS
#include "cuda/kernels.h"
#endif

namespace polyhead {

#ifdef POLYHEAD_EXTRA_KERNEL
extern const Kernel POLYHEAD_EXTRA_KERNEL;  // of a test: tests/attention/dummy_kernel.cc
#endif
#ifdef POLYHEAD_EXTRA_FLOAT32_KERNEL
extern const Kernel POLYHEAD_EXTRA_FLOAT32_KERNEL;
#endif

std::span<const Kernel* const> kernel_list() {
  static constexpr const Kernel* kOthers[] = {
#ifdef __x86_64__
      &kAmxFloat32,  // for who asks for it: slower than vectors below 256 queries
#endif
#ifdef POLYHEAD_EXTRA_KERNEL
      &POLYHEAD_EXTRA_KERNEL,
#endif
#ifdef POLYHEAD_EXTRA_FLOAT32_KERNEL
      &POLYHEAD_EXTRA_FLOAT32_KERNEL,
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

const char* measured_order() { return cpu::isa_order().measured; }

Result<const Kernel*> choose_kernel(const AttentionDesc& desc, std::string_view name, Device device) {
  return choose_on(device, kernel_list(), desc, name);
}

// Usable on this machine: takes an ordinary problem in one dtype at least.
std::vector<std::string> kernels() try {
  std::vector<std::string> names;
  for (const Kernel* kernel : kernel_list()) {
    AttentionDesc desc;
    desc.seqlen_q = desc.seqlen_k = desc.head_dim = desc.head_dim_v = 64;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
      desc.dtype = dtype;
      if (!kernel->why_not(desc).empty()) continue;
      names.emplace_back(kernel->name);
      break;
    }
  }
  return names;
} catch (const std::bad_alloc&) {
  return {};
}

}  // namespace polyhead
