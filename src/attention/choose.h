// Which kernel of a list computes a desc.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention/kernel.h"

namespace polyhead {

// The kernel that is called `name`, or with an empty name the first that can. An error lists what there is and why not.
// `source` is where the name comes from: "kernel" or "POLYHEAD_KERNEL".
Result<const Kernel*> choose_among(std::span<const Kernel* const> kernels, const AttentionDesc& desc,
                                   std::string_view name, const char* source);

}  // namespace polyhead
