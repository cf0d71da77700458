// Parts of a block of memory, in order, each aligned to 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace polyhead {

class MemoryMap {
 public:
  // The offset of an array of that many elements.
  size_t take(std::initializer_list<int64_t> sizes, size_t element_bytes);
  size_t take_bytes(size_t bytes) { return take({1}, bytes); }

  size_t bytes() const { return bytes_; }
  bool fits() const { return fits_; }  // in the address space

 private:
  size_t bytes_ = 0;
  bool fits_ = true;
};

}  // namespace polyhead
