// Which kernels this build and this machine have.
#pragma once

#include <string>
#include <vector>

#include "polyhead/api.h"
#include "polyhead/tensor.h"

namespace polyhead {

/// Names of the kernels usable on this machine, best first, "reference" last.
POLYHEAD_API std::vector<std::string> kernels();

/// Instruction sets the CPU reports that a kernel of ours uses, best first, as "amx avx512bf16 avx512 avx2" or
/// "neon".
POLYHEAD_API std::string cpu_features();

/// What this machine can do at best: multiply-adds of one thread on registers alone, in the best kernel's words, GFLOP/s.
/// bfloat16: of its bfloat16 product, or float32's where it has none. Takes `seconds`; the denominator of benchmarks.
POLYHEAD_API double measure_peak_gflops(DType dtype, double seconds = 0.05);

/// "0.1.0"
POLYHEAD_API const char* version();

}  // namespace polyhead
