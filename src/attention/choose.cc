#include "attention/choose.h"

#include "core/forced_kernel.h"
#include "core/sentence.h"

namespace polyhead {
namespace {

void append_name(std::string& names, const char* name) {
  if (!names.empty()) names += ", ";
  names += name;
}

}  // namespace

Result<const Kernel*> choose_among(std::span<const Kernel* const> kernels, const AttentionDesc& desc,
                                   std::string_view name, const char* source) {
  if (name.empty()) {
    std::string reasons;
    for (const Kernel* kernel : kernels) {
      const std::string reason = kernel->why_not(desc);
      if (reason.empty()) return kernel;
      append_name(reasons, kernel->name);
      reasons += sentence(" (", reason, ")");
    }
    return Status(StatusCode::kUnsupported, sentence("no kernel can compute this: ", reasons));
  }
  const Kernel* forced = nullptr;
  std::string known, able;
  for (const Kernel* kernel : kernels) {
    append_name(known, kernel->name);
    if (name == kernel->name) forced = kernel;
  }
  if (forced == nullptr) {
    return Status(StatusCode::kInvalidArgument, sentence(source, " is ", name, ", known are ", known));
  }
  const std::string reason = forced->why_not(desc);
  if (reason.empty()) return forced;
  for (const Kernel* kernel : kernels) {
    if (kernel->why_not(desc).empty()) append_name(able, kernel->name);
  }
  return Status(StatusCode::kUnsupported, sentence(source, " is ", name, ", which cannot compute this: ", reason,
                                                   able.empty() ? "; no other can" : "; these can: ", able));
}

Result<const Kernel*> choose_kernel(const AttentionDesc& desc, std::string_view name) {
  if (!name.empty()) return choose_among(kernel_list(), desc, name, "kernel");
  return choose_among(kernel_list(), desc, forced_kernel(), "POLYHEAD_KERNEL");
}

}  // namespace polyhead
