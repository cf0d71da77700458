// What CUDA has to be asked about: the device, and where memory and streams belong.
#pragma once

#include <span>
#include <string>

#include "contract/linear.h"
#include "polyhead/attention.h"
#include "polyhead/status.h"

namespace polyhead::cuda {

constexpr int kLeastMajor = 8;  // of the compute capability that the kernels are compiled for

// Why the calling thread's current device cannot run the kernels; "" if it can.
std::string why_no_device();

// Bytes of shared memory that a block of it may have; or why it cannot be asked.
Result<int> shared_bytes_of_block();

// Whether it runs what is compiled for 9.0 alone (warpgroup.cuh).
bool has_warpgroup_products();

// Whether kernels on the current device may touch the tensors and the workspace of a call: they would not ask. And whether
// its stream, null being CUDA's own, is the device's.
Status check_place(const AttentionDesc& desc, const ForwardArgs& args, size_t workspace_bytes, void* stream);
Status check_place(const AttentionDesc& desc, const BackwardArgs& args, size_t workspace_bytes, void* stream);
Status check_place(std::span<const linear::NamedMemory> memory, void* stream);

}  // namespace polyhead::cuda
