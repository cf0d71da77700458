// polyhead::attention_block_forward, feed_forward_block_forward, and their backward operators.
#pragma once

#include "stable_abi.h"

namespace polyhead::torch_ops {

bool register_blocks(TorchLibraryHandle library);  // false on failure

}  // namespace polyhead::torch_ops
