#include "core/verbose.h"

#include <cstdio>
#include <cstring>

#include "core/environment.h"

namespace polyhead {

bool is_verbose() {
  static const bool kFromEnvironment = [] {
    const char* value = environment("POLYHEAD_VERBOSE");
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
  }();
  return kFromEnvironment;
}

void print_line(std::string line) {
  line += '\n';
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace polyhead
