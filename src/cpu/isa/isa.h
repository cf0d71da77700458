// Which instruction sets this machine has: CPU and operating system together. Compiled without ISA flags.
#pragma once

#include <string>

#include "cpu/isa/list.h"

namespace polyhead::cpu {

const char* isa_name(Isa isa);  // "avx2"

// Whether kernels compiled for `isa` run here. Detected once.
bool has(Isa isa);

// "this CPU has no AVX2, FMA", or, where the system must be asked for registers and refuses, its words; else "".
std::string why_not(Isa isa);

// Whether the CPU is Intel's. How far hardware follows memory by itself differs by make, not by feature.
bool by_intel();

// The features that kernels compiled for `isa` need, as the compiler names them: "SSE3 SSSE3 ...".
std::string isa_features(Isa isa);

}  // namespace polyhead::cpu
