// Shared memory of a block, and who did what to each half-word of it.
//
// Every warp has a clock of the others' clocks (Lamport, Mattern): a barrier joins those of its warps and ticks. An
// access is ordered behind an earlier one of another warp if the warp's clock has reached that one's; behind one of
// another lane of the same warp if the warp has ticked since (bar.warp.sync, or a barrier). What is not ordered is a
// race.
//
// A warp's products (wgmma) read asynchronously, and through another proxy than all else: what they read must have been
// fenced (fence.proxy.async) by the thread that wrote it, before the barrier; and may be written again when the warp has
// waited for them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device_memory.h"
#include "mbarrier.h"

namespace cuda_sim {

class SharedMemory {
 public:
  SharedMemory(int bytes, int num_warps);

  void reset();  // before a block

  // Where a lane's bytes lie; faults if it must not touch them.
  unsigned char* reach(const Warp& warp, const Instruction& i, int lane, uint64_t address, int bytes, Access access);

  // cp.async: bytes that a lane may not touch before it has waited for them, nor others before a barrier behind that.
  unsigned char* reach_in_flight(const Warp& warp, const Instruction& i, int lane, uint64_t address, int bytes);
  // All that the lane had in flight there has landed.
  void land(const Warp& warp, int lane, uint64_t address, int bytes);

  // Where 16 bytes lie that all lanes of a warp read for its product of that number.
  const unsigned char* reach_for_product(const Warp& warp, const Instruction& i, uint64_t address, uint32_t product);
  // The warp has waited for its first so many.
  void end_products(int warp, size_t count);
  // fence.proxy.async
  void fence(int warp, uint32_t mask);

  void tick(int warp) { ++clock(warp, warp); }
  std::vector<uint32_t> clocks(int warp) const;
  void join(int warp, const std::vector<uint32_t>& others);

  Mbarriers mbarriers;

 private:
  enum class State : uint8_t { kPlain, kAtomic, kInFlight };
  struct Writer {
    uint16_t clock = 0;  // 0: never written
    uint16_t site = 0;
    uint8_t warp = 0;
    uint8_t lane : 5 = 0;
    State state : 2 = State::kPlain;
    uint16_t fences = 0;  // of the warp, before

    bool operator==(const Writer&) const = default;
  };
  struct Reader {
    uint16_t clock = 0;  // 0: has not read since the last write
    uint16_t site = 0;
    uint8_t lane = 0;
    bool many = false;  // other lanes too
  };
  // Of 16 bytes.
  struct ProductReader {
    uint32_t product = 0;  // the last that reads them; 0: none
    uint16_t site = 0;
  };
  struct Fence {
    uint32_t clock = 0, mask = 0;  // when, of which lanes
  };

  uint32_t& clock(int warp, int of) { return clocks_[static_cast<size_t>(warp * num_warps_ + of)]; }
  // Whether a warp's time is before what another, or its other lanes, do now.
  bool is_before(uint32_t time, int of, int warp);
  size_t check_bounds(const Warp& warp, const Instruction& i, int lane, uint64_t address, int bytes) const;
  void check_writer(const Warp& warp, const Instruction& i, int lane, const Writer& writer, Access access);
  void check_readers(const Warp& warp, const Instruction& i, int lane, size_t cell);
  void check_products(const Warp& warp, const Instruction& i, int lane, size_t cell);
  void check_fence(const Warp& warp, const Instruction& i, const Writer& writer);
  void write(const Warp& warp, const Instruction& i, int lane, size_t cell, State state);
  void read(const Warp& warp, const Instruction& i, int lane, size_t cell);
  [[noreturn]] void race(const Warp& warp, const Instruction& i, int lane, const char* what, int other_warp,
                         int other_lane, int site) const;

  const int num_warps_;
  std::vector<unsigned char> bytes_;
  std::vector<Writer> writers_;                 // [half-word]
  std::vector<Reader> readers_;                 // [half-word, warp]
  std::vector<uint32_t> clocks_;                // [warp, warp]
  bool any_product_ = false;                    // has read, since the block began
  std::vector<ProductReader> product_readers_;  // [16 bytes, warp]
  std::vector<std::vector<uint32_t>> ended_;    // [warp, product]: when it was waited for
  std::vector<std::vector<Fence>> fences_;      // [warp]
  std::vector<uint16_t> num_fences_;            // [warp]
};

}  // namespace cuda_sim
