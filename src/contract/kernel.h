// One way to compute attention on one device. kernel_list.cc names them all, best first.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/memory_size.h"
#include "core/threads.h"
#include "polyhead/attention.h"

namespace polyhead {

struct Kernel {
  const char* name;  // "<device>_<isa>", user-visible and stable
  Device device;     // where a call's tensors and workspace lie

  // Why this kernel cannot compute `desc` here, as one clause ("this CPU has no AVX-512"); "" if it can.
  std::string (*why_not)(const AttentionDesc& desc);

  // Scratch memory of one call on `num_threads`, a multiple of 64; the plan refuses what does not fit.
  MemorySize (*workspace_bytes)(const AttentionDesc& desc, int num_threads);
  MemorySize (*backward_workspace_bytes)(const AttentionDesc& desc, int num_threads);  // for any gradients

  // The shapes of `args` have been checked against `desc`, and args.workspace is large enough for run.num_threads and
  // aligned. What lies in the tensors has not: lengths and offsets are checked here, where they lie, before anything is
  // written. Then every element of every output that is given is written, rows behind cu_seqlens' end included.
  Status (*forward)(const AttentionDesc& desc, const ForwardArgs& args, const Run& run);

  // Likewise: every element of every gradient that is given, or, with args.accumulate, added to.
  Status (*backward)(const AttentionDesc& desc, const BackwardArgs& args, const Run& run);

  // Null, or what is done once, when a plan is made: later calls of forward find it.
  Status (*prepare)(const AttentionDesc& desc) = nullptr;
};

// Every kernel of this build, best first; the reference is last. The same until the process ends.
std::span<const Kernel* const> kernel_list();

// Why the list's order is not the one that the CPU's feature flags tell: "measured: ..."; "" where it is.
const char* measured_order();

// The kernel that `name` (empty: POLYHEAD_KERNEL, else the best of those on `device`) picks for an already checked desc.
Result<const Kernel*> choose_kernel(const AttentionDesc& desc, std::string_view name, Device device = Device::kCpu);

}  // namespace polyhead
