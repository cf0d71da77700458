// A number that the environment may set, for tests that run more or other cases when asked to.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace polyhead::testing {

inline int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoll(text, nullptr, 10) : otherwise;
}

}  // namespace polyhead::testing
