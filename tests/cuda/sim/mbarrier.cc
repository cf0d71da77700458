// PTX ISA 9.0, "Parallel Synchronization and Communication Instructions: mbarrier".
#include "mbarrier.h"

#include <algorithm>

#include "opcodes.h"
#include "reach.h"
#include "shared_memory.h"

namespace cuda_sim {

Mbarriers::Mbarrier& Mbarriers::find(const Warp& warp, const Instruction& i, int lane, uint64_t address) {
  const auto found = all_.find(address);
  if (found == all_.end()) warp.fault(i, "no mbarrier at shared address " + std::to_string(address), lane);
  const Mbarrier& begun = found->second;
  const uint32_t known = warp.shared.clocks(warp.index)[static_cast<size_t>(begun.warp)];
  const bool same = warp.index == begun.warp;
  if (same ? lane != begun.lane && known <= begun.time : known < begun.time) {
    warp.fault(i,
               "the mbarrier is not begun yet: warp " + std::to_string(begun.warp) + ", lane " +
                   std::to_string(begun.lane) + " does so without a barrier between",
               lane);
  }
  return found->second;
}

void Mbarriers::init(const Warp& warp, const Instruction& i, int lane, uint64_t address, uint32_t count) {
  if (count == 0 || count > 0xfffff) warp.fault(i, "an mbarrier of " + std::to_string(count) + " arrivals", lane);
  const uint32_t now = warp.shared.clocks(warp.index)[static_cast<size_t>(warp.index)];
  all_[address] = {warp.index, lane, now, count, 0, 0, {}, {}};
}

void Mbarriers::arrive(const Warp& warp, const Instruction& i, int lane, uint64_t address, uint32_t count,
                       const std::vector<uint32_t>& clocks) {
  Mbarrier& barrier = find(warp, i, lane, address);
  const auto join = [](std::vector<uint32_t>& to, const std::vector<uint32_t>& from) {
    to.resize(from.size());
    std::transform(to.begin(), to.end(), from.begin(), to.begin(),
                   [](uint32_t a, uint32_t b) { return std::max(a, b); });
  };
  join(barrier.now, clocks);
  barrier.arrived += count;
  if (barrier.arrived > barrier.expected) {
    warp.fault(i, "more arrivals than the mbarrier's " + std::to_string(barrier.expected), lane);
  }
  if (barrier.arrived < barrier.expected) return;
  join(barrier.over, barrier.now);
  barrier.now.clear();
  barrier.arrived = 0;
  ++barrier.phase;
}

const std::vector<uint32_t>* Mbarriers::wait(const Warp& warp, const Instruction& i, int lane, uint64_t address,
                                             uint32_t parity) {
  const Mbarrier& barrier = find(warp, i, lane, address);
  return (barrier.phase & 1) == parity ? nullptr : &barrier.over;
}

namespace {

constexpr int kBytes = 8;

void init(Warp& w, const Instruction& i, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    const uint64_t address = w.address(i, 0, 0, lane);
    reach(w, i, lane, address, kBytes, Access::kWrite);
    w.shared.mbarriers.init(w, i, lane, address, w.get<uint32_t>(i.args[1], lane));
  });
}

void arrive(Warp& w, const Instruction& i, uint32_t mask) {
  std::vector<uint32_t> clocks = w.shared.clocks(w.index);
  const bool all = mask == w.lanes;
  if (!all) --clocks[static_cast<size_t>(w.index)];
  for_lanes(mask, [&](int lane) {
    const uint64_t address = w.address(i, 1, 0, lane);
    reach(w, i, lane, address, kBytes, Access::kAtomic);
    const uint32_t count = i.num_args > 2 ? w.get<uint32_t>(i.args[2], lane) : 1;
    w.shared.mbarriers.arrive(w, i, lane, address, count, clocks);
    w.put<uint64_t>(i.args[0], lane, 0);
  });
  if (all) w.shared.tick(w.index);
}

// The lanes of `mask` wait together: the scheduler asks again until the answer is yes.
void try_wait(Warp& w, const Instruction& i, uint32_t mask) {
  const int first = first_lane(mask);
  const uint64_t address = w.address(i, 1, 0, first);
  const uint32_t parity = w.get<uint32_t>(i.args[2], first), others = w.predicate(i.args[0]) & ~mask;
  for_lanes(mask, [&](int lane) {
    if (w.address(i, 1, 0, lane) != address || w.get<uint32_t>(i.args[2], lane) != parity) {
      w.fault(i, "lanes wait for different phases, which is not modelled", lane);
    }
  });
  if (parity > 1) w.fault(i, "a phase of parity " + std::to_string(parity), first);
  const std::vector<uint32_t>* const over = w.shared.mbarriers.wait(w, i, first, address, parity);
  if (over != nullptr) {
    if (!over->empty()) w.shared.join(w.index, *over);
    for_lanes(mask, [&](int lane) { reach(w, i, lane, address, kBytes, Access::kAtomic); });
  }
  w.put<uint32_t>(i.args[0], 0, others | (over != nullptr ? mask : 0));
}

}  // namespace

void add_mbarrier_opcodes(OpcodeTable& t) {
  const auto add = [&](const std::string& what, const Opcode& opcode, const char* counted) {
    for (const char* space : {".shared", ".shared::cta"}) {
      Opcode o = opcode;
      o.space = Space::kShared;
      t["mbarrier." + what + space + ".b64" + counted] = o;
    }
  };
  add("init", {init, "=@w"}, "");
  add("arrive", {arrive, "l=@"}, "");
  add("arrive", {arrive, "l=@w"}, "/3");
  add("try_wait.parity", {try_wait, "p=@w", Kind::kPoll}, "");
}

}  // namespace cuda_sim
