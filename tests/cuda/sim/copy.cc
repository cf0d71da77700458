// cp.async: PTX ISA 9.0, "Data Movement and Conversion Instructions: Non-bulk copy".
//
// The bytes are in shared memory at once, but nobody may touch them before the lane that copied has waited for their
// group; others, not before a barrier behind that. Groups are each lane's own.
#include <algorithm>
#include <cstring>

#include "opcodes.h"
#include "reach.h"
#include "shared_memory.h"

namespace cuda_sim {
namespace {

// The opcode's `bytes`: how many it must be, 0: 4, 8 or 16. With a fourth operand only so many bytes are read, and the
// rest is 0.
void copy(Warp& w, const Instruction& i, uint32_t mask) {
  uint64_t sources[kLanes];
  for_lanes(mask, [&](int lane) {
    const uint32_t bytes = w.get<uint32_t>(i.args[2], lane);
    const uint32_t given = i.num_args > 3 ? w.get<uint32_t>(i.args[3], lane) : bytes;
    const bool legal = i.bytes ? bytes == i.bytes : bytes == 4 || bytes == 8 || bytes == 16;
    if (!legal || given > bytes)
      w.fault(i, "copies " + std::to_string(given) + " of " + std::to_string(bytes) + " bytes", lane);
    const uint64_t to = w.address(i, 0, 0, lane);
    sources[lane] = w.address(i, 1, 1, lane);
    check_aligned(w, i, lane, to, static_cast<int>(bytes));
    check_aligned(w, i, lane, sources[lane], static_cast<int>(bytes));
    unsigned char* at = w.shared.reach_in_flight(w, i, lane, to, static_cast<int>(bytes));
    std::memset(at, 0, bytes);
    if (given > 0) {
      std::memcpy(at, w.launch.memory.reach(w, i, lane, sources[lane], static_cast<int>(given), Access::kRead), given);
    }
    w.in_flight.push_back({lane, static_cast<int>(bytes), to, w.committed[lane]});
  });
  if (mask) {
    const auto bytes = static_cast<int>(w.get<uint32_t>(i.args[2], first_lane(mask)));
    count_sectors(w.launch.counters, sources, mask, bytes);
  }
}

void commit(Warp& w, const Instruction&, uint32_t mask) {
  for_lanes(mask, [&](int lane) { ++w.committed[lane]; });
}

template <class IsDone>
void wait(Warp& w, uint32_t mask, const IsDone& is_done) {
  const auto lands = [&](const InFlight& copy) {
    if (!(mask >> copy.lane & 1) || !is_done(copy)) return false;
    w.shared.land(w, copy.lane, copy.address, copy.bytes);
    return true;
  };
  w.in_flight.erase(std::remove_if(w.in_flight.begin(), w.in_flight.end(), lands), w.in_flight.end());
}

void wait_group(Warp& w, const Instruction& i, uint32_t mask) {
  const int pending = static_cast<int>(w.get<uint32_t>(i.args[0], 0));
  wait(w, mask, [&](const InFlight& copy) { return copy.group < w.committed[copy.lane] - pending; });
}

void wait_all(Warp& w, const Instruction&, uint32_t mask) {
  wait(w, mask, [](const InFlight&) { return true; });
}

}  // namespace

void add_copy_opcodes(OpcodeTable& t) {
  for (const char* cache : {"ca", "cg"}) {
    for (const char* hint : {"", ".L2::64B", ".L2::128B", ".L2::256B"}) {
      const std::string name = std::string("cp.async.") + cache + ".shared.global" + hint;
      Opcode whole{copy, "=@@w"}, part{copy, "=@@ww"};
      whole.bytes = part.bytes = cache[1] == 'g' ? 16 : 0;
      t[name] = whole;
      t[name + "/4"] = part;
    }
  }
  t["cp.async.commit_group"] = {commit, "="};
  t["cp.async.wait_group"] = {wait_group, "=w"};
  t["cp.async.wait_all"] = {wait_all, "="};
}

}  // namespace cuda_sim
