// polyhead::merge_forward and merge_backward.
#pragma once

#include "stable_abi.h"

namespace polyhead::torch_ops {

// Does nothing before torch 2.10, whose interface has no lists: then the kernels are Python's. False on failure.
bool register_merge(TorchLibraryHandle library);

}  // namespace polyhead::torch_ops
