#include "shared_memory.h"

#include <algorithm>

#include "warp.h"

namespace cuda_sim {
namespace {

uint16_t site_of(const Warp& warp, const Instruction& i) {
  return static_cast<uint16_t>(&i - warp.launch.kernel.code.data());
}

}  // namespace

SharedMemory::SharedMemory(int bytes, int num_warps)
    : num_warps_(num_warps),
      bytes_(static_cast<size_t>(bytes)),
      writers_(static_cast<size_t>(bytes + 1) / 2),
      readers_(writers_.size() * static_cast<size_t>(num_warps)),
      clocks_(static_cast<size_t>(num_warps) * static_cast<size_t>(num_warps)) {}

void SharedMemory::reset() {
  std::fill(bytes_.begin(), bytes_.end(), 0xa5);
  std::fill(writers_.begin(), writers_.end(), Writer{});
  std::fill(readers_.begin(), readers_.end(), Reader{});
  std::fill(clocks_.begin(), clocks_.end(), 0);
  for (int warp = 0; warp < num_warps_; ++warp) clock(warp, warp) = 1;
}

std::vector<uint32_t> SharedMemory::clocks(int warp) const {
  const auto begin = clocks_.begin() + warp * num_warps_;
  return {begin, begin + num_warps_};
}

void SharedMemory::join(int warp, const std::vector<uint32_t>& others) {
  for (int n = 0; n < num_warps_; ++n) clock(warp, n) = std::max(clock(warp, n), others[static_cast<size_t>(n)]);
}

size_t SharedMemory::check_bounds(const Warp& warp, const Instruction& i, int lane, uint64_t address, int bytes) const {
  if (address >= bytes_.size() || static_cast<uint64_t>(bytes) > bytes_.size() - address) {
    warp.fault(
        i,
        "out of bounds: shared address " + std::to_string(address) + " of " + std::to_string(bytes_.size()) + " bytes",
        lane);
  }
  return address / 2;
}

void SharedMemory::race(const Warp& warp, const Instruction& i, int lane, const char* what, int other_warp,
                        int other_lane, int site) const {
  const Instruction& there = warp.launch.kernel.code[static_cast<size_t>(site)];
  warp.fault(i,
             std::string("race: ") + what + " warp " + std::to_string(other_warp) + ", lane " +
                 std::to_string(other_lane) + ", " + *there.name + " at " + warp.launch.module.place(there.place) +
                 ", without a barrier between",
             lane);
}

void SharedMemory::check_writer(const Warp& warp, const Instruction& i, int lane, const Writer& writer, Access access) {
  if (writer.clock == 0) {
    if (access != Access::kWrite) warp.fault(i, "shared memory read before it was written", lane);
    return;
  }
  if (writer.state == State::kInFlight) {
    race(warp, i, lane, "touched while a cp.async to it is in flight, issued by", writer.warp, writer.lane,
         writer.site);
  }
  if (access == Access::kAtomic && writer.state == State::kAtomic) return;
  const bool same = writer.warp == warp.index;
  if (same && writer.lane == lane) return;
  const bool ordered =
      same ? writer.clock < clock(warp.index, warp.index) : clock(warp.index, writer.warp) >= writer.clock;
  if (!ordered) {
    race(warp, i, lane, access == Access::kWrite ? "written, and written by" : "read, and written by", writer.warp,
         writer.lane, writer.site);
  }
}

void SharedMemory::check_readers(const Warp& warp, const Instruction& i, int lane, const Reader* readers) {
  for (int other = 0; other < num_warps_; ++other) {
    const Reader& reader = readers[other];
    if (reader.clock == 0) continue;
    const bool same = other == warp.index;
    if (same && reader.lane == lane && !reader.many) continue;
    const bool ordered = same ? reader.clock < clock(other, other) : clock(warp.index, other) >= reader.clock;
    if (!ordered) race(warp, i, lane, "written, and read by", other, reader.lane, reader.site);
  }
}

void SharedMemory::write(const Warp& warp, const Instruction& i, int lane, size_t cell, State state) {
  const uint32_t now = clock(warp.index, warp.index);
  if (now > UINT16_MAX) warp.fault(i, "more barriers than the race check can count");
  writers_[cell] = {static_cast<uint16_t>(now), site_of(warp, i), static_cast<uint8_t>(warp.index),
                    static_cast<uint8_t>(lane), state};
  Reader* readers = &readers_[cell * static_cast<size_t>(num_warps_)];
  std::fill(readers, readers + num_warps_, Reader{});
}

void SharedMemory::read(const Warp& warp, const Instruction& i, int lane, size_t cell) {
  Reader& reader = readers_[cell * static_cast<size_t>(num_warps_) + static_cast<size_t>(warp.index)];
  const uint32_t now = clock(warp.index, warp.index);
  if (now > UINT16_MAX) warp.fault(i, "more barriers than the race check can count");
  const bool many = reader.clock == now && (reader.many || reader.lane != lane);
  reader = {static_cast<uint16_t>(now), site_of(warp, i), static_cast<uint8_t>(lane), many};
}

unsigned char* SharedMemory::reach(const Warp& warp, const Instruction& i, int lane, uint64_t address, int bytes,
                                   Access access) {
  const size_t first = check_bounds(warp, i, lane, address, bytes);
  const size_t last = (address + static_cast<uint64_t>(bytes) - 1) / 2;
  if (bytes == 1 && access != Access::kRead)
    warp.fault(i, "stores of one byte to shared memory are not modelled", lane);
  for (size_t cell = first; cell <= last; ++cell) {
    check_writer(warp, i, lane, writers_[cell], access);
    if (access == Access::kRead || access == Access::kConstantRead) {
      read(warp, i, lane, cell);
    } else {
      check_readers(warp, i, lane, &readers_[cell * static_cast<size_t>(num_warps_)]);
      write(warp, i, lane, cell, access == Access::kAtomic ? State::kAtomic : State::kPlain);
    }
  }
  return &bytes_[address];
}

unsigned char* SharedMemory::reach_in_flight(const Warp& warp, const Instruction& i, int lane, uint64_t address,
                                             int bytes) {
  const size_t first = check_bounds(warp, i, lane, address, bytes);
  for (size_t cell = first; cell < first + static_cast<size_t>(bytes) / 2; ++cell) {
    check_writer(warp, i, lane, writers_[cell], Access::kWrite);
    check_readers(warp, i, lane, &readers_[cell * static_cast<size_t>(num_warps_)]);
    write(warp, i, lane, cell, State::kInFlight);
  }
  return &bytes_[address];
}

void SharedMemory::land(const Warp& warp, int lane, uint64_t address, int bytes) {
  for (size_t cell = address / 2; cell < (address + static_cast<uint64_t>(bytes)) / 2; ++cell) {
    Writer& writer = writers_[cell];
    if (writer.state != State::kInFlight || writer.warp != warp.index || writer.lane != lane) continue;
    writer.state = State::kPlain;
    writer.clock = static_cast<uint16_t>(clock(warp.index, warp.index));
  }
}

}  // namespace cuda_sim
