// What runs: a launch, its blocks one after the other, the warps of a block, and the registers of a warp's 32 lanes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "fault.h"
#include "program.h"
#include "warpgroup.h"

namespace cuda_sim {

class DeviceMemory;
class SharedMemory;

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = ~0u;

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
  unsigned count() const { return x * y * z; }
};

// Counted over launches until somebody sets them to 0.
struct Counters {
  uint64_t instructions = 0;                 // of warps
  uint64_t bank_phases = 0, bank_waves = 0;  // shared memory: waves = phases where no two lanes want one bank
  uint64_t sectors = 0, ideal_sectors = 0;   // global memory, of 32 bytes
  std::map<std::string, uint64_t> by_opcode;

  Counters& operator+=(const Counters& other);
};

// What all warps of a launch share.
struct Launch {
  const Module& module;
  const Kernel& kernel;
  Dim3 grid, block;
  int shared_bytes = 0;  // declared and asked for
  std::vector<unsigned char> parameters;
  DeviceMemory& memory;
  Counters& counters;
  std::vector<uint64_t> executed;  // [instruction of the kernel]: by how many warps
};

// Bytes of shared memory that a lane's cp.async writes.
struct InFlight {
  int lane = 0, bytes = 0;
  uint64_t address = 0;
  int group = 0;  // of the lane, from 0
};

// Lanes that stand at the same instruction.
struct Group {
  int pc = 0;
  uint32_t mask = 0;
  bool blocked = false;  // at an instruction that others must reach
};

class Warp {
 public:
  Warp(Launch& launch, SharedMemory& shared, Warpgroup& group, int index);

  // Of a thread, when a block starts: its kernel is compiled for as many as all threads can have.
  int registers_at_first() const { return std::min(65536 / static_cast<int>(launch.block.count()), 256) / 8 * 8; }

  // Before a block starts: no lane has run, no register has been written.
  void reset(Dim3 block_index, uint32_t block_number);

  unsigned char* at(int slot) { return &slots_[static_cast<size_t>(slot) * kLanes * 4]; }
  uint32_t predicate(int slot) { return get<uint32_t>(slot, 0); }
  // The predicate that is operand n.
  uint32_t predicate(const Instruction& i, int n) {
    return predicate(i.args[n]) ^ (i.negated >> n & 1 ? kAllLanes : 0);
  }

  // A lane's word: 8 bytes apart for types of 8 bytes, else 4.
  template <class T>
  T get(int slot, int lane) {
    T value;
    std::memcpy(&value, at(slot) + lane * (sizeof(T) == 8 ? 8 : 4), sizeof(T));
    return value;
  }
  template <class T>
  void put(int slot, int lane, T value) {
    if constexpr (sizeof(T) == 2) {
      uint16_t bits;
      std::memcpy(&bits, &value, 2);
      put<uint32_t>(slot, lane, bits);
    } else {
      std::memcpy(at(slot) + lane * (sizeof(T) == 8 ? 8 : 4), &value, sizeof(T));
    }
  }
  // Operand n of a lane, whatever its width, without a sign.
  uint64_t word(const Instruction& i, int n, int lane) {
    return i.wide >> n & 1 ? get<uint64_t>(i.args[n], lane) : get<uint32_t>(i.args[n], lane);
  }
  void put_word(const Instruction& i, int n, int lane, uint64_t value) {
    if (i.wide >> n & 1) return put<uint64_t>(i.args[n], lane, value);
    put<uint32_t>(i.args[n], lane, static_cast<uint32_t>(value));
  }

  // The address that operand n is, the `which`-th of the instruction.
  uint64_t address(const Instruction& i, int n, int which, int lane) {
    return word(i, n, lane) + static_cast<uint64_t>(i.offset[which]);
  }

  // Faults where a lane of `mask` reads a slot that it never wrote.
  void check_written(const Instruction& i, int slot, uint32_t mask) {
    if (mask & ~written_[static_cast<size_t>(slot)]) unwritten(i, slot, mask);
  }
  void set_written(int slot, uint32_t mask) { written_[static_cast<size_t>(slot)] |= mask; }

  // "<what>, at kernel.cu:12 (from :30), block (0, 1, 0), warp 2, lane 5"; lane < 0: without one.
  [[noreturn]] void fault(const Instruction& i, const std::string& what, int lane = -1) const;

  Launch& launch;
  SharedMemory& shared;
  Warpgroup& group;
  const int index;            // in its block
  const uint32_t lanes;       // that exist: fewer in a last warp that is not full
  uint32_t ended = 0;         // those that have returned
  uint32_t block_number = 0;  // of the launch, from 0
  Dim3 block_index;
  std::vector<Group> groups;
  std::vector<unsigned char> local;     // .local, of all lanes
  bool waits = false;                   // at a barrier
  int barrier = 0;                      // which
  const Instruction* stands = nullptr;  // waiting
  std::vector<InFlight> in_flight;
  int committed[kLanes] = {};                   // groups of cp.async, of each lane
  int registers = 0;                            // that a thread may have
  const Instruction* sets_registers = nullptr;  // the last setmaxnreg
  Products products;

 private:
  [[noreturn]] void unwritten(const Instruction& i, int slot, uint32_t mask) const;
  void set_special(const SpecialSlot& special);

  std::vector<unsigned char> slots_;
  std::vector<uint32_t> written_;  // [slot]: by which lanes
};

// "lanes 0-15, 20"
std::string lanes_of(uint32_t mask);

// The first lane of a mask that is not 0.
inline int first_lane(uint32_t mask) { return __builtin_ctz(mask); }

// Calls f(lane) for the lanes of a mask.
template <class F>
void for_lanes(uint32_t mask, const F& f) {
  if (mask == kAllLanes) {
    for (int lane = 0; lane < kLanes; ++lane) f(lane);
  } else {
    for (; mask; mask &= mask - 1) f(first_lane(mask));
  }
}

// d = f(operands...) of each lane: the operands are of types S..., the result of type D.
template <class D, class... S, class F, size_t... N>
void map_lanes(Warp& w, const Instruction& i, uint32_t mask, const F& f, std::index_sequence<N...>) {
  D result[kLanes];
  const int first = i.num_results;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = f(w.get<S>(i.args[first + static_cast<int>(N)], lane)...);
  for_lanes(mask, [&](int lane) { w.put<D>(i.args[0], lane, result[lane]); });
}
template <class D, class... S, class F>
void map_lanes(Warp& w, const Instruction& i, uint32_t mask, const F& f) {
  map_lanes<D, S...>(w, i, mask, f, std::index_sequence_for<S...>());
}

}  // namespace cuda_sim
