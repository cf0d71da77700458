// Kernels that the variable POLYHEAD_SIMULATED_PTX puts in the place of the program's own: see planted_faults.py.
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "runtime.h"

namespace cuda_sim {
namespace {

std::map<std::string, int> launches;  // of each kernel of the file

// A mangled name without its anonymous namespace, which tells the file that the kernel was compiled from.
std::string plain_name(const std::string& mangled) {
  const size_t at = mangled.find("_GLOBAL__N_");
  if (at == std::string::npos) return mangled;
  size_t begin = at;  // of its length
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(mangled[begin - 1]))) --begin;
  return mangled.substr(0, begin) + mangled.substr(at + std::stoul(mangled.substr(begin, at - begin)));
}

// The file's kernels; null: none is given.
Binary* read_replacements() {
  const char* const path = std::getenv("POLYHEAD_SIMULATED_PTX");
  if (path == nullptr) return nullptr;
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  auto made = std::make_unique<Binary>();
  try {
    made->module = parse(text.str());
    if (made->module.kernels.empty()) throw Fault("no kernel is there");
  } catch (const Fault& fault) {
    std::fprintf(stderr, "POLYHEAD_SIMULATED_PTX is %s: %s\n", path, fault.what());
    std::exit(1);
  }
  made->parsed = true;
  for (const auto& [name, kernel] : made->module.kernels) launches[name] = 0;
  std::atexit([] {
    for (const auto& [name, count] : launches)
      std::fprintf(stderr, "POLYHEAD_SIMULATED_PTX: %d launches of %s\n", count, name.c_str());
  });
  return made.release();
}

Binary* replacements() {
  static Binary* const read = read_replacements();
  return read;
}

}  // namespace

void replace(Entry& entry) {
  if (replacements() == nullptr || entry.binary == replacements()) return;
  for (const auto& [name, kernel] : replacements()->module.kernels) {
    if (plain_name(name) != plain_name(entry.name)) continue;
    entry.binary = replacements();
    entry.name = name;
    return;
  }
}

void count_if_replaced(const Entry& entry) {
  if (entry.binary == replacements() && entry.binary != nullptr) ++launches[entry.name];
}

}  // namespace cuda_sim
