// Memory of one operand: 64-byte aligned, owned.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>

namespace polyhead::tools {

struct FreeBuffer {
  void operator()(std::byte* data) const { std::free(data); }
};
using Buffer = std::unique_ptr<std::byte[], FreeBuffer>;

// Null if the machine has not so much memory.
inline Buffer new_buffer(size_t size_bytes) {
  const size_t rounded = (std::max<size_t>(size_bytes, 1) + 63) / 64 * 64;
  const auto physical = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (rounded < size_bytes || static_cast<double>(size_bytes) > physical) return nullptr;
  return Buffer(static_cast<std::byte*>(std::aligned_alloc(64, rounded)));
}

}  // namespace polyhead::tools
