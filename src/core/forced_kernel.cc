#include "core/forced_kernel.h"

#include <cstring>

#include "core/environment.h"

namespace polyhead {
namespace {

struct ForcedKernel {
  char name[64] = "";
  ForcedKernel() {
    const char* value = environment("POLYHEAD_KERNEL");
    if (value != nullptr) std::strncpy(name, value, sizeof name - 1);
  }
};

}  // namespace

const char* forced_kernel() {
  static const ForcedKernel kFromEnvironment;
  return kFromEnvironment.name;
}

}  // namespace polyhead
