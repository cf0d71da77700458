#include "device_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "warp.h"

namespace cuda_sim {

DeviceMemory::~DeviceMemory() {
  for (auto& [address, buffer] : buffers_) {
    if (buffer.mapping) munmap(buffer.mapping, buffer.mapping_bytes);
  }
}

void* DeviceMemory::allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t inner = (bytes + page - 1) / page * page;
  void* mapping = mmap(nullptr, inner + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  unsigned char* begin = static_cast<unsigned char*>(mapping) + page;
  if (mprotect(begin, inner, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping, inner + 2 * page);
    return nullptr;
  }
  begin += (inner - bytes) / 256 * 256;  // the end is where overruns begin
  lend(begin, bytes, false);
  Buffer& buffer = buffers_[reinterpret_cast<uint64_t>(begin)];
  buffer.mapping = mapping;
  buffer.mapping_bytes = inner + 2 * page;
  return begin;
}

bool DeviceMemory::release(void* pointer) {
  const auto found = buffers_.find(reinterpret_cast<uint64_t>(pointer));
  if (found == buffers_.end() || !found->second.mapping) return false;
  munmap(found->second.mapping, found->second.mapping_bytes);
  buffers_.erase(found);
  last_ = nullptr;
  return true;
}

void DeviceMemory::lend(void* pointer, size_t bytes, bool written) {
  Buffer buffer;
  buffer.bytes = bytes;
  buffer.cells.resize(bytes / 2 + 2);
  buffers_[reinterpret_cast<uint64_t>(pointer)] = std::move(buffer);
  last_ = nullptr;
  if (written) set_written(pointer, bytes);
}

void DeviceMemory::take_back(void* pointer) {
  buffers_.erase(reinterpret_cast<uint64_t>(pointer));
  last_ = nullptr;
}

DeviceMemory::Buffers::value_type* DeviceMemory::find(uint64_t address, size_t bytes) {
  const auto holds = [&](const Buffers::value_type& b) {
    return address >= b.first && address - b.first <= b.second.bytes && bytes <= b.second.bytes - (address - b.first);
  };
  if (last_ && holds(*last_)) return last_;
  auto after = buffers_.upper_bound(address);
  if (after == buffers_.begin() || !holds(*--after)) return nullptr;
  return last_ = &*after;
}

void DeviceMemory::set_written(const void* pointer, size_t bytes) {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  Buffers::value_type* buffer = find(address, bytes);
  if (!buffer || bytes == 0) return;
  const size_t first = (address - buffer->first) / 2, last = (address - buffer->first + bytes - 1) / 2;
  for (size_t n = first; n <= last; ++n) buffer->second.cells[n] = {1, 0, 0, 0, 0};
}

bool DeviceMemory::is_written(const void* pointer, size_t bytes) {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  const Buffers::value_type* buffer = find(address, bytes);
  if (!buffer || bytes == 0) return bytes == 0;
  const auto cells = buffer->second.cells.begin();
  const auto at = [&](uint64_t offset) { return cells + static_cast<std::ptrdiff_t>(offset / 2); };
  const uint64_t offset = address - buffer->first;
  return std::all_of(at(offset), at(offset + bytes - 1) + 1, [](const Cell& cell) { return cell.writer != 0; });
}

void DeviceMemory::begin_launch(uint64_t num_blocks) {
  launch_begin_ = next_launch_;
  next_launch_ += num_blocks;
  if (next_launch_ > UINT32_MAX) throw Fault("more than 2^32 blocks since the process began");
}

void DeviceMemory::conflict(const Warp& warp, const Instruction& i, int lane, const Cell& cell, const char* what,
                            uint32_t other) const {
  const Instruction& there = warp.launch.kernel.code[cell.site];
  warp.fault(i,
             std::string("race between blocks: ") + what + " block " + std::to_string(other - launch_begin_) +
                 " of the grid, " + *there.name + " at " + warp.launch.module.place(there.place),
             lane);
}

void DeviceMemory::touch(const Warp& warp, const Instruction& i, int lane, Cell& cell, Access access) {
  const uint32_t self = static_cast<uint32_t>(launch_begin_) + warp.block_number;
  const bool written_now = cell.writer >= launch_begin_, read_now = cell.reader >= launch_begin_;
  const bool foreign = written_now && cell.writer != self;
  if (access != Access::kWrite && cell.writer == 0) warp.fault(i, "global memory read before it was written", lane);
  if (foreign && !(access == Access::kAtomic && (cell.writer_flags & kByAtomic))) {
    conflict(warp, i, lane, cell, access == Access::kWrite ? "written by" : "read or updated, and written by",
             cell.writer);
  }
  const bool writes = access == Access::kWrite || access == Access::kAtomic;
  if (access == Access::kConstantRead && written_now) warp.fault(i, "ld.global.nc of what this launch wrote", lane);
  if (writes && read_now) {
    if (cell.reader_flags & kConstant) warp.fault(i, "written, and read by ld.global.nc in this launch", lane);
    if (cell.reader != self || (cell.reader_flags & kByMany))
      conflict(warp, i, lane, cell, "written, and read by", cell.reader);
  }
  cell.site = static_cast<uint16_t>(&i - warp.launch.kernel.code.data());
  if (writes) {
    const bool mixed = written_now && !(cell.writer_flags & kByAtomic);
    cell.writer_flags = access == Access::kAtomic && !mixed ? kByAtomic : 0;
    cell.writer = self;
  } else {
    cell.reader_flags = read_now ? cell.reader_flags : 0;
    if (read_now && cell.reader != self) cell.reader_flags |= kByMany;
    if (access == Access::kConstantRead) cell.reader_flags |= kConstant;
    cell.reader = self;
  }
}

unsigned char* DeviceMemory::reach(const Warp& warp, const Instruction& i, int lane, uint64_t address, int bytes,
                                   Access access) {
  Buffers::value_type* buffer = find(address, static_cast<size_t>(bytes));
  if (!buffer) {
    const auto near = buffers_.upper_bound(address);
    std::string text = "out of bounds: global address " + std::to_string(address);
    if (near != buffers_.begin()) {
      const auto& [begin, before] = *std::prev(near);
      text += ", " + std::to_string(address - begin) + " bytes behind the beginning of a buffer of " +
              std::to_string(before.bytes);
    }
    warp.fault(i, text, lane);
  }
  const uint64_t offset = address - buffer->first;
  for (uint64_t n = offset / 2; n <= (offset + static_cast<uint64_t>(bytes) - 1) / 2; ++n) {
    touch(warp, i, lane, buffer->second.cells[n], access);
  }
  return reinterpret_cast<unsigned char*>(address);
}

}  // namespace cuda_sim
