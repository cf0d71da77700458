// Which kernels this build and this machine have.
#pragma once

#include <string>
#include <vector>

#include "polyhead/api.h"

namespace polyhead {

/// Names of the kernels usable on this machine, best first, "reference" last.
POLYHEAD_API std::vector<std::string> kernels();

/// Instruction sets the CPU reports that a kernel of ours uses, best first, as "avx512bf16 avx512 avx2".
POLYHEAD_API std::string cpu_features();

/// "0.1.0"
POLYHEAD_API const char* version();

}  // namespace polyhead
