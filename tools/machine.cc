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
