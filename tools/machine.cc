#include "machine.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <cstdlib>
#include <ctime>
#include <fstream>

#include "core/cpu_count.h"
#include "polyhead/cuda.h"
#include "polyhead/kernels.h"
#include "report.h"
#include "tools/build_facts.h"

namespace polyhead::tools {

std::string version_text() { return fmt::format("{} (commit {})", version(), kCommit); }

std::string compiler_text() { return fmt::format("{}, {}", kCompiler, kBuildType); }

// Arm's have numbers in place of a name.
std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  std::string implementer;
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    if (line.rfind("model name", 0) == 0) return line.substr(colon + 2);
    if (line.rfind("CPU implementer", 0) == 0) implementer = line.substr(colon + 2);
    if (line.rfind("CPU part", 0) == 0)
      return fmt::format("Arm, implementer {}, part {}", implementer, line.substr(colon + 2));
  }
  return "unknown";
}

std::string cpu_extensions() {
#if defined(__aarch64__) && defined(__linux__)
  const struct {
    const char* name;
    unsigned long register_of_bits, bit;
  } rows[] = {{"asimd", AT_HWCAP, HWCAP_ASIMD},     {"asimdhp", AT_HWCAP, HWCAP_ASIMDHP},
              {"asimddp", AT_HWCAP, HWCAP_ASIMDDP}, {"sve", AT_HWCAP, HWCAP_SVE},
              {"sve2", AT_HWCAP2, HWCAP2_SVE2},     {"i8mm", AT_HWCAP2, HWCAP2_I8MM},
              {"bf16", AT_HWCAP2, HWCAP2_BF16}};
  std::string names;
  for (const auto& row : rows) {
    if ((getauxval(row.register_of_bits) & row.bit) != 0) names += (names.empty() ? "" : " ") + std::string(row.name);
  }
  return names;
#else
  return "";
#endif
}

std::vector<std::pair<std::string, std::string>> cuda_facts() {
  const CudaMachine machine = cuda_machine();
  const auto version = [](int number) { return fmt::format("{}.{}", number / 1000, number % 1000 / 10); };
  std::string all = machine.why_not;
  if (machine.driver_version != 0 && machine.runtime_version != 0) {
    all += fmt::format("{}built with CUDA {}, the driver serves {}", all.empty() ? "" : "; ",
                       version(machine.runtime_version), version(machine.driver_version));
  }
  std::vector<std::pair<std::string, std::string>> facts = {{"CUDA", all}};
  for (const CudaDevice& device : machine.devices) {
    std::string text = fmt::format("{}, compute capability {}.{}, {:.1f} GiB", device.name, device.capability_major,
                                   device.capability_minor, static_cast<double>(device.memory_bytes) / (1 << 30));
    if (!device.why_not.empty()) text += "; cannot be used: " + device.why_not;
    facts.emplace_back(fmt::format("GPU {}", facts.size() - 1), text);
  }
  return facts;
}

int num_usable_cpus() { return num_cpus_allowed(); }

std::vector<std::pair<std::string, std::string>> machine_facts() {
  double load = 0;
  const bool has_load = getloadavg(&load, 1) == 1;
  return {{"polyhead", version_text()},
          {"compiler", compiler_text()},
          {"cpu", fmt::format("{} ({} usable; {})", cpu_model(), num_usable_cpus(), cpu_features())},
          {"load", has_load ? fmt::format("{:.2f}", load) : "unknown"},
          {"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))}};
}

}  // namespace polyhead::tools
