// Whether this program runs under a sanitizer: asked at run time, for tests are the same objects with and without one.
#pragma once

#include <cstdlib>

extern "C" {
__attribute__((weak)) void __asan_init();
__attribute__((weak)) void __tsan_init();
__attribute__((weak)) void __ubsan_handle_builtin_unreachable(void*);
}

namespace polyhead {

inline bool under_address_sanitizer() { return &__asan_init != nullptr; }
inline bool under_thread_sanitizer() { return &__tsan_init != nullptr; }

// Whether runs are for a sanitizer's eyes alone: nothing is compared with the definition.
inline bool memory_alone() {
  static const bool sanitized =
      under_address_sanitizer() || under_thread_sanitizer() || &__ubsan_handle_builtin_unreachable != nullptr;
  static const bool alone = sanitized && std::getenv("POLYHEAD_TEST_FULL") == nullptr;
  return alone;
}

}  // namespace polyhead
