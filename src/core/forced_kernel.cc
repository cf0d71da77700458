#include "core/forced_kernel.h"

#include <cstdlib>
#include <cstring>

namespace polyhead {
namespace {

struct ForcedKernel {
  char name[64] = "";
  ForcedKernel() {
#if defined(__GLIBC__)
    const char* value = secure_getenv("POLYHEAD_KERNEL");
#else
    const char* value = std::getenv("POLYHEAD_KERNEL");
#endif
    if (value != nullptr) std::strncpy(name, value, sizeof name - 1);
  }
};

}  // namespace

const char* forced_kernel() {
  static const ForcedKernel kFromEnvironment;
  return kFromEnvironment.name;
}

}  // namespace polyhead
