#include "polyhead/kernels.h"

namespace polyhead {

// POLYHEAD_VERSION: the project's version in CMakeLists.txt.
const char* version() { return POLYHEAD_VERSION; }

}  // namespace polyhead
