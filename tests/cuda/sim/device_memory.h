// Global memory: the host's own, of which kernels may touch what was allocated or lent. Each half-word knows whether it
// was ever written, and which block of the running launch read or wrote it: blocks have no order, so that what one
// writes no other may touch, unless both do so by atomics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "program.h"

namespace cuda_sim {

class Warp;

enum class Access : uint8_t { kRead, kConstantRead, kWrite, kAtomic };

class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory();

  // Aligned to 256 bytes, between pages that nobody may touch; unwritten. Null without bytes or memory.
  void* allocate(size_t bytes);
  // False if it is not the beginning of an allocation.
  bool release(void* pointer);

  // Memory of the host that kernels may use as if it were allocated, and the end of that.
  void lend(void* pointer, size_t bytes, bool written);
  void take_back(void* pointer);

  bool contains(const void* pointer, size_t bytes) {
    return bytes == 0 || find(reinterpret_cast<uint64_t>(pointer), bytes);
  }
  int num_buffers() const { return static_cast<int>(buffers_.size()); }
  // Of the allocation or loan that holds the byte; null: none does.
  const void* beginning(const void* pointer) {
    const Buffers::value_type* const found = find(reinterpret_cast<uint64_t>(pointer), 1);
    return found == nullptr ? nullptr : reinterpret_cast<const void*>(found->first);
  }
  // The host writes.
  void set_written(const void* pointer, size_t bytes);
  // Whether the host may read: all was written.
  bool is_written(const void* pointer, size_t bytes);

  void begin_launch(uint64_t num_blocks);

  // Where a lane's bytes lie; faults if it must not touch them.
  unsigned char* reach(const Warp& warp, const Instruction& i, int lane, uint64_t address, int bytes, Access access);

 private:
  // Stamps count up over launches: 0 never, 1 the host, else a block of a launch.
  struct Cell {
    uint32_t writer = 0, reader = 0;
    uint8_t writer_flags = 0, reader_flags = 0;
    uint16_t site = 0;  // of the last access, an instruction of the kernel
  };
  static constexpr uint8_t kByAtomic = 1, kByMany = 2, kConstant = 4;
  struct Buffer {
    size_t bytes = 0;
    void* mapping = nullptr;  // of an allocation
    size_t mapping_bytes = 0;
    std::vector<Cell> cells;
  };
  using Buffers = std::map<uint64_t, Buffer>;

  Buffers::value_type* find(uint64_t address, size_t bytes);
  void touch(const Warp& warp, const Instruction& i, int lane, Cell& cell, Access access);
  [[noreturn]] void conflict(const Warp& warp, const Instruction& i, int lane, const Cell& cell, const char* what,
                             uint32_t other) const;

  Buffers buffers_;
  Buffers::value_type* last_ = nullptr;
  uint64_t launch_begin_ = 2, next_launch_ = 2;  // stamps of the running launch's blocks
};

}  // namespace cuda_sim
