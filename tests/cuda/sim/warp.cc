#include "warp.h"

#include <algorithm>

namespace cuda_sim {

Counters& Counters::operator+=(const Counters& other) {
  instructions += other.instructions;
  bank_phases += other.bank_phases, bank_waves += other.bank_waves;
  sectors += other.sectors, ideal_sectors += other.ideal_sectors;
  for (const auto& [name, count] : other.by_opcode) by_opcode[name] += count;
  return *this;
}

namespace {

uint32_t lanes_that_exist(const Dim3& block, int warp) {
  const int threads = static_cast<int>(block.count()) - warp * kLanes;
  return threads >= kLanes ? kAllLanes : (1u << threads) - 1;
}

}  // namespace

std::string lanes_of(uint32_t mask) {
  std::string text = (mask & (mask - 1)) == 0 ? "lane" : "lanes";
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) continue;
    int last = lane;
    while (last + 1 < kLanes && (mask >> (last + 1) & 1)) ++last;
    text += (text.back() == 'e' || text.back() == 's' ? " " : ", ") + std::to_string(lane);
    if (last > lane) text += "-" + std::to_string(last);
    lane = last;
  }
  return text;
}

Warp::Warp(Launch& of, SharedMemory& memory, Warpgroup& four, int number)
    : launch(of),
      shared(memory),
      group(four),
      index(number),
      lanes(lanes_that_exist(of.block, number)),
      products(of.kernel) {
  const size_t slots = static_cast<size_t>(of.kernel.num_slots);
  slots_.resize(slots * kLanes * 4);
  written_.resize(slots);
  local.resize(static_cast<size_t>(of.kernel.local_bytes) * kLanes);
  for (const Constant& constant : of.kernel.constants) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (constant.wide) {
        put<uint64_t>(constant.slot, lane, constant.bits);
      } else {
        put<uint32_t>(constant.slot, lane, static_cast<uint32_t>(constant.bits));
      }
    }
  }
}

void Warp::set_special(const SpecialSlot& special) {
  const Dim3& b = launch.block;
  for (int lane = 0; lane < kLanes; ++lane) {
    const unsigned thread = static_cast<unsigned>(index * kLanes + lane);
    const uint32_t bit = 1u << lane;
    const auto value = [&]() -> uint32_t {
      switch (special.what) {
        case Special::kTidX: return thread % b.x;
        case Special::kTidY: return thread / b.x % b.y;
        case Special::kTidZ: return thread / b.x / b.y;
        case Special::kNtidX: return b.x;
        case Special::kNtidY: return b.y;
        case Special::kNtidZ: return b.z;
        case Special::kCtaidX: return block_index.x;
        case Special::kCtaidY: return block_index.y;
        case Special::kCtaidZ: return block_index.z;
        case Special::kNctaidX: return launch.grid.x;
        case Special::kNctaidY: return launch.grid.y;
        case Special::kNctaidZ: return launch.grid.z;
        case Special::kLane: return static_cast<uint32_t>(lane);
        case Special::kWarp: return static_cast<uint32_t>(index);
        case Special::kMaskEqual: return bit;
        case Special::kMaskLess: return bit - 1;
        case Special::kMaskLessEqual: return bit | (bit - 1);
        case Special::kMaskGreater: return ~(bit | (bit - 1));
        case Special::kMaskGreaterEqual: return ~(bit - 1);
      }
      return 0;
    };
    put<uint32_t>(special.slot, lane, value());
  }
}

void Warp::reset(Dim3 where, uint32_t number) {
  block_index = where;
  block_number = number;
  ended = 0;
  waits = false;
  in_flight.clear();
  products.reset();
  registers = registers_at_first();
  sets_registers = nullptr;
  std::fill(committed, committed + kLanes, 0);
  groups.assign(1, {0, lanes, false});
  std::fill(written_.begin(), written_.end(), 0);
  for (const Constant& constant : launch.kernel.constants) set_written(constant.slot, kAllLanes);
  for (const SpecialSlot& special : launch.kernel.specials) {
    set_special(special);
    set_written(special.slot, kAllLanes);
  }
}

void Warp::fault(const Instruction& i, const std::string& what, int lane) const {
  const Dim3& b = block_index;
  std::string text = what + ", at " + launch.module.place(i.place) + ", " + *i.name + ", block (" +
                     std::to_string(b.x) + ", " + std::to_string(b.y) + ", " + std::to_string(b.z) + "), warp " +
                     std::to_string(index);
  if (lane >= 0) text += ", lane " + std::to_string(lane);
  throw Fault(text);
}

void Warp::unwritten(const Instruction& i, int slot, uint32_t mask) const {
  const uint32_t lacking = mask & ~written_[static_cast<size_t>(slot)];
  fault(i, "register read before it was written: by " + lanes_of(lacking), first_lane(lacking));
}

}  // namespace cuda_sim
