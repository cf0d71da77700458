// Which kernel of a list computes a problem: attention's and linear's lists alike.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/forced_kernel.h"
#include "core/sentence.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead {

inline void append_name(std::string& names, const char* name) {
  if (!names.empty()) names += ", ";
  names += name;
}

// The kernel that is called `name`, or with an empty name the first that can. An error lists what there is and why not.
// `source` is where the name comes from: "kernel" or "POLYHEAD_KERNEL"; `listed` says what this list is one of.
template <class Kernels, class Problem>
auto choose_among(const Kernels& kernels, const Problem& problem, std::string_view name, const char* source,
                  const char* listed = "known") {
  using Pointer = std::remove_cv_t<std::remove_reference_t<decltype(kernels[0])>>;
  using Chosen = Result<Pointer>;
  if (name.empty()) {
    std::string reasons;
    for (const auto* kernel : kernels) {
      const std::string reason = kernel->why_not(problem);
      if (reason.empty()) return Chosen(kernel);
      append_name(reasons, kernel->name);
      reasons += sentence(" (", reason, ")");
    }
    return Chosen(Status(StatusCode::kUnsupported, sentence("no kernel can compute this: ", reasons)));
  }
  Pointer forced = nullptr;
  std::string known, able;
  for (const auto* kernel : kernels) {
    append_name(known, kernel->name);
    if (name == kernel->name) forced = kernel;
  }
  if (forced == nullptr) {
    return Chosen(Status(StatusCode::kInvalidArgument, sentence(source, " is ", name, ", ", listed, " are ", known)));
  }
  const std::string reason = forced->why_not(problem);
  if (reason.empty()) return Chosen(forced);
  for (const auto* kernel : kernels) {
    if (kernel->why_not(problem).empty()) append_name(able, kernel->name);
  }
  return Chosen(Status(StatusCode::kUnsupported, sentence(source, " is ", name, ", which cannot compute this: ", reason,
                                                          able.empty() ? "; no other can" : "; these can: ", able)));
}

// Of those on `device`, as a caller's option `name` asks, or, if that is empty, as POLYHEAD_KERNEL does.
template <class Kernels, class Problem>
auto choose_on(Device device, const Kernels& kernels, const Problem& problem, std::string_view name,
               const char* listed = "known") {
  using Pointer = std::remove_cv_t<std::remove_reference_t<decltype(kernels[0])>>;
  using Chosen = Result<Pointer>;
  const char* const source = name.empty() ? "POLYHEAD_KERNEL" : "kernel";
  const std::string_view asked = name.empty() ? forced_kernel() : name;
  std::vector<Pointer> there;
  there.reserve(kernels.size());
  for (const auto* kernel : kernels) {
    if (kernel->device == device) there.push_back(kernel);
  }
  if (there.empty()) {
    return Chosen(Status(StatusCode::kUnsupported,
                         sentence("device is ", device_name(device), ", this build has no kernel for it")));
  }
  for (const auto* kernel : kernels) {
    if (kernel->device == device || asked != kernel->name) continue;
    return Chosen(Status(StatusCode::kUnsupported,
                         sentence(source, " is ", asked, ", which computes on ", device_name(kernel->device),
                                  ", the call's tensors are on ", device_name(device))));
  }
  return choose_among(there, problem, asked, source, listed);
}

}  // namespace polyhead
