// Counts what a test's own thread allocates, and fails one allocation on demand. It replaces operator new, so one source of
// a program includes it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace {
thread_local int64_t num_allocations = 0;
thread_local int64_t failing_allocation = -1;  // counted like num_allocations
}  // namespace

[[gnu::noinline]] void* operator new(size_t bytes) {
  if (num_allocations++ == failing_allocation) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
