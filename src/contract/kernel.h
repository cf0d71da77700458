// One way to compute attention on one device. kernel_list.cc names them all, best first.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "polyhead/attention.h"

namespace polyhead {

struct Kernel {
  const char* name;  // "<device>_<isa>", user-visible and stable

  // Why this kernel cannot compute `desc` here, as one clause ("this CPU has no AVX-512"); "" if it can.
  std::string (*why_not)(const AttentionDesc& desc);

  // Scratch memory of one call, on an executor of `num_threads`. A multiple of 64.
  size_t (*workspace_bytes)(const AttentionDesc& desc, int num_threads);
  size_t (*backward_workspace_bytes)(const AttentionDesc& desc, int num_threads);  // whatever gradients are asked for

  // `args` have been checked against `desc`, and args.workspace is large enough and aligned. Must write every element
  // of every output that is given, rows behind cu_seqlens' end included.
  void (*forward)(const AttentionDesc& desc, const ForwardArgs& args, Executor& executor);

  // Likewise: every element of every gradient that is given, or, with args.accumulate, adds to it.
  void (*backward)(const AttentionDesc& desc, const BackwardArgs& args, Executor& executor);
};

// Every kernel of this build, best first; the reference is last. The same until the process ends.
std::span<const Kernel* const> kernel_list();

// Why the list's order is not the one that the CPU's feature flags tell: "measured: ..."; "" where it is.
const char* measured_order();

// The kernel that `name` (empty: POLYHEAD_KERNEL, else the best) picks for an already checked desc.
Result<const Kernel*> choose_kernel(const AttentionDesc& desc, std::string_view name);

}  // namespace polyhead
