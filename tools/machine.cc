#include "machine.h"

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

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
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
