// The one place that names the backends of src/linear.
#include "core/forced_kernel.h"
#include "core/sentence.h"
#include "cpu/linear_kernels.h"
#include "linear/linear.h"
#include "linear/reference.h"

namespace polyhead::linear {
namespace {

void append_name(std::string& names, const char* name) {
  if (!names.empty()) names += ", ";
  names += name;
}

}  // namespace

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
  const char* source = name.empty() ? "POLYHEAD_KERNEL" : "kernel";
  if (name.empty()) name = forced_kernel();
  if (name.empty()) {
    std::string reasons;
    for (const Kernel* kernel : kernel_list()) {
      const std::string reason = kernel->why_not(dtype);
      if (reason.empty()) return kernel;
      append_name(reasons, kernel->name);
      reasons += sentence(" (", reason, ")");
    }
    return Status(StatusCode::kUnsupported, sentence("no kernel can compute this: ", reasons));
  }
  const Kernel* forced = find_kernel(name);
  std::string known, able;
  for (const Kernel* kernel : kernel_list()) {
    append_name(known, kernel->name);
    if (kernel->why_not(dtype).empty()) append_name(able, kernel->name);
  }
  if (forced == nullptr) {
    return Status(StatusCode::kInvalidArgument, sentence(source, " is ", name, ", known are ", known));
  }
  const std::string reason = forced->why_not(dtype);
  if (reason.empty()) return forced;
  return Status(StatusCode::kUnsupported, sentence(source, " is ", name, ", which cannot compute this: ", reason,
                                                   able.empty() ? "; no other can" : "; these can: ", able));
}

}  // namespace polyhead::linear
