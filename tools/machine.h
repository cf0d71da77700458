// What was measured where: the facts that stand over every table.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace polyhead::tools {

std::string version_text();   // "0.1.0 (commit 0123456789)"
std::string compiler_text();  // "GNU 12.2.0, Release"
std::string cpu_model();
std::string cpu_extensions();  // of the vector unit, as getauxval tells on 64-bit Arm: "asimd asimdhp"; elsewhere ""
int num_usable_cpus();         // that this process may run on

// Driver and GPUs, or why there are none to use: {"CUDA", ...}, {"GPU 0", "NVIDIA A100, compute capability 8.0, 80 GiB"}
std::vector<std::pair<std::string, std::string>> cuda_facts();

// version, compiler, CPU, load (of all processes, over one minute) and date.
std::vector<std::pair<std::string, std::string>> machine_facts();

}  // namespace polyhead::tools
