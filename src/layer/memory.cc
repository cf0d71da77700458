#include "layer/memory.h"

namespace polyhead {

size_t MemoryMap::take(std::initializer_list<int64_t> sizes, size_t element_bytes) {
  const size_t offset = bytes_;
  size_t bytes = element_bytes;
  bool beyond = false, empty = false;
  for (const int64_t size : sizes) {
    if (size == 0) empty = true;
    beyond |= __builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes);
  }
  if (empty) return offset;
  beyond |= __builtin_add_overflow(bytes, size_t{63}, &bytes);
  beyond |= __builtin_add_overflow(bytes_, bytes / 64 * 64, &bytes_);
  fits_ = fits_ && !beyond && bytes_ <= size_t{PTRDIFF_MAX};
  return offset;
}

}  // namespace polyhead
