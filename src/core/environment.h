// What a variable of the environment says.
#pragma once

#include <cstdlib>

namespace polyhead {

// Null if it is not set, or not to be trusted: in a program with more rights than its caller.
inline const char* environment(const char* name) {
#if defined(__GLIBC__)
  return secure_getenv(name);
#else
  return std::getenv(name);
#endif
}

}  // namespace polyhead
