// The kernel that the environment asks for.
#pragma once

namespace polyhead {

// POLYHEAD_KERNEL as it was when first asked for; "" if it was not set. A name longer than any kernel has stays unknown
// when cut.
const char* forced_kernel();

}  // namespace polyhead
