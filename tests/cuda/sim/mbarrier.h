// Barriers in shared memory (mbarrier): a phase is over when so many arrivals were counted.
//
// What lanes did before they arrived is before what lanes do that have waited for the phase: of an arrival of all lanes of a
// warp all of it, of one of some lanes what the warp did before its last bar.warp.sync or barrier.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace cuda_sim {

class Warp;
struct Instruction;

class Mbarriers {
 public:
  void reset() { all_.clear(); }  // before a block

  void init(const Warp& warp, const Instruction& i, int lane, uint64_t address, uint32_t count);
  // Lanes of a warp, at its time `clocks`.
  void arrive(const Warp& warp, const Instruction& i, int lane, uint64_t address, uint32_t count,
              const std::vector<uint32_t>& clocks);
  // Null as long as the phase of that parity goes on; what those had done who arrived in phases that are over.
  const std::vector<uint32_t>* wait(const Warp& warp, const Instruction& i, int lane, uint64_t address,
                                    uint32_t parity);

 private:
  struct Mbarrier {
    int warp = 0, lane = 0;  // that began it
    uint32_t time = 0;       // when
    uint32_t expected = 0, arrived = 0, phase = 0;
    std::vector<uint32_t> now, over;  // clocks of who arrived in this phase, and before
  };

  Mbarrier& find(const Warp& warp, const Instruction& i, int lane, uint64_t address);

  std::map<uint64_t, Mbarrier> all_;
};

}  // namespace cuda_sim
