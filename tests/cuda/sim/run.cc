// The scheduler. A warp is a list of groups: lanes that stand at the same instruction. The group furthest behind runs;
// groups that meet become one. An instruction that lanes must do together blocks a group until the others have come. A
// warp runs to the next barrier, or its end; then the next one does.
#include "run.h"

#include <algorithm>

#include "shared_memory.h"

namespace cuda_sim {
namespace {

// Lanes that end stay in no group.
class WarpRun {
 public:
  explicit WarpRun(Warp& warp) : w_(warp), code_(warp.launch.kernel.code) {}

  // Until it waits at a barrier, or for others' arrival, or has ended; whether it has done anything. At bar.arrive,
  // arrive(instruction) is called.
  template <class Arrive>
  bool run(const Arrive& arrive) {
    for (Group& g : w_.groups) g.blocked = g.blocked && !polls(g);
    while (!w_.waits && !w_.groups.empty()) {
      merge();
      const auto next = std::find_if(w_.groups.begin(), w_.groups.end(), [](const Group& g) { return !g.blocked; });
      if (next == w_.groups.end()) {
        const auto poll = std::find_if(w_.groups.begin(), w_.groups.end(), [this](const Group& g) { return polls(g); });
        if (poll == w_.groups.end()) stuck();
        w_.stands = &code_[static_cast<size_t>(poll->pc)];
        break;
      }
      current_ = static_cast<size_t>(next - w_.groups.begin());
      const int stop = current_ + 1 < w_.groups.size() ? w_.groups[current_ + 1].pc : static_cast<int>(code_.size());
      while (group().pc < stop && step(arrive)) {
      }
      if (current_ < w_.groups.size() && group().mask && group().pc >= static_cast<int>(code_.size())) {
        w_.fault(code_.back(), "the kernel's code ends without ret", first_lane(group().mask));
      }
    }
    return moved_;
  }

 private:
  Group& group() { return w_.groups[current_]; }
  bool polls(const Group& g) const { return code_[static_cast<size_t>(g.pc)].kind == Kind::kPoll; }

  // In the order of where they stand; those at one place become one, and whoever waited there may go on.
  void merge() {
    auto& groups = w_.groups;
    std::sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.pc < b.pc; });
    size_t kept = 0;
    for (size_t n = 1; n < groups.size(); ++n) {
      if (groups[n].pc == groups[kept].pc) {
        groups[kept] = {groups[n].pc, groups[kept].mask | groups[n].mask, false};
      } else {
        groups[++kept] = groups[n];
      }
    }
    groups.resize(kept + 1);
  }

  // One instruction of the current group; false if the groups must be looked at again.
  template <class Arrive>
  bool step(const Arrive& arrive) {
    const Instruction& i = code_[static_cast<size_t>(group().pc)];
    uint32_t mask = group().mask;
    if (i.guard >= 0) {
      w_.check_written(i, i.guard, mask);
      mask &= w_.predicate(i.guard) ^ (i.unless ? kAllLanes : 0);
    }
    ++w_.launch.executed[static_cast<size_t>(group().pc)];
    if (i.kind == Kind::kPoll && mask) return poll(i, mask);
    moved_ = true;
    switch (i.kind) {
      case Kind::kLane:
        if (mask) execute(i, mask);
        ++group().pc;
        return true;
      case Kind::kBranch: return branch(i, mask);
      case Kind::kExit: return exit(i, mask);
      default: return mask ? together(i, mask, arrive) : (++group().pc, true);
    }
  }

  void execute(const Instruction& i, uint32_t mask) {
    for (int n = i.num_results; n < i.num_args; ++n) w_.check_written(i, i.args[n], mask);
    if (w_.products.any() && i.kind != Kind::kGroup) w_.products.touch(w_, i, mask);
    i.run(w_, i, mask);
    for (int n = 0; n < i.num_results; ++n) w_.set_written(i.args[n], mask);
  }

  bool branch(const Instruction& i, uint32_t taken) {
    Group& here = group();
    if (taken == here.mask) {
      here.pc = i.target;
      return false;
    }
    ++here.pc;
    if (taken == 0) return true;
    here.mask &= ~taken;
    w_.groups.push_back({i.target, taken, false});
    return false;
  }

  bool exit(const Instruction& i, uint32_t mask) {
    w_.ended |= mask;
    if (w_.ended == w_.lanes) w_.products.check_ended(w_, i);
    group().mask &= ~mask;
    ++group().pc;
    if (group().mask) return true;
    w_.groups.erase(w_.groups.begin() + static_cast<std::ptrdiff_t>(current_));
    return false;
  }

  uint32_t members(const Instruction& i, uint32_t mask) {
    if (i.kind != Kind::kMembers) return w_.lanes;
    const int slot = i.args[i.num_args - 1];
    w_.check_written(i, slot, mask);
    const uint32_t wanted = w_.get<uint32_t>(slot, first_lane(mask));
    for_lanes(mask, [&](int lane) {
      if (w_.get<uint32_t>(slot, lane) != wanted) w_.fault(i, "divergence: lanes name different members", lane);
      if (!(wanted >> lane & 1)) w_.fault(i, "divergence: the lane is not among the members that it names", lane);
    });
    return wanted & w_.lanes;
  }

  // What waits for others' arrival does so in its group.
  bool poll(const Instruction& i, uint32_t mask) {
    if (mask != group().mask) {
      leave_out(mask);
      return false;
    }
    execute(i, mask);
    group().blocked = (w_.predicate(i.args[0]) & mask) != mask;
    if (group().blocked) return false;
    moved_ = true;
    ++group().pc;
    return true;
  }

  // The lanes that leave an instruction out go on.
  void leave_out(uint32_t mask) {
    w_.groups.push_back({group().pc + 1, group().mask & ~mask, false});
    group().mask = mask;
  }

  // What `mask` does together with others. If they are not all here, the group waits for them.
  template <class Arrive>
  bool together(const Instruction& i, uint32_t mask, const Arrive& arrive) {
    if (mask != group().mask) {
      leave_out(mask);
      return false;
    }
    const uint32_t wanted = members(i, mask);
    if (wanted != mask) {
      group().blocked = true;
      return false;
    }
    if (i.kind == Kind::kBarrier || i.kind == Kind::kArrive) {
      for (int n = 0; n < i.num_args; ++n) w_.check_written(i, i.args[n], mask);
    } else {
      execute(i, mask);
    }
    ++group().pc;
    if (i.kind == Kind::kArrive) arrive(i);
    if (i.kind != Kind::kBarrier) return true;
    w_.waits = true;
    w_.stands = &i;
    return false;
  }

  [[noreturn]] void stuck() {
    std::string text = "divergence: lanes wait for others that never come";
    for (const Group& g : w_.groups) {
      const Instruction& i = code_[static_cast<size_t>(g.pc)];
      text += "; " + lanes_of(g.mask) + " at " + *i.name + ", " + w_.launch.module.place(i.place);
    }
    if (w_.ended) text += "; " + lanes_of(w_.ended) + " have ended";
    const Instruction& first = code_[static_cast<size_t>(w_.groups[0].pc)];
    if (first.kind == Kind::kBarrier) text = "barrier never opens: " + text;
    w_.fault(first, text, first_lane(w_.groups[0].mask));
  }

  Warp& w_;
  const std::vector<Instruction>& code_;
  size_t current_ = 0;
  bool moved_ = false;
};

class BlockRun {
 public:
  BlockRun(Launch& launch, int num_warps)
      : shared_(launch.shared_bytes, num_warps), groups_(static_cast<size_t>(num_warps + 3) / 4) {
    for (int n = 0; n < num_warps; ++n) {
      warps_.emplace_back(launch, shared_, groups_[static_cast<size_t>(n) / 4], n);
    }
  }

  void run(Dim3 index, uint32_t number) {
    shared_.reset();
    for (Warp& warp : warps_) warp.reset(index, number);
    for (Barrier& barrier : barriers_) barrier = {};
    for (Warpgroup& group : groups_) group.reset();
    for (;;) {
      bool moved = false, all_ended = true;
      for (Warp& warp : warps_) {
        if (warp.groups.empty() || warp.waits) continue;
        if (WarpRun(warp).run([&](const Instruction& i) { arrive(warp, i, false); })) moved = true;
        if (warp.waits) arrive(warp, *warp.stands, true);
      }
      for (const Warp& warp : warps_) all_ended = all_ended && warp.groups.empty();
      if (all_ended) break;
      if (!moved) never_opens();
    }
    for (size_t n = 0; n < groups_.size(); ++n) groups_[n].check_complete(&warps_[4 * n]);
    check_registers();
  }

 private:
  static constexpr int kBarriers = 16;
  struct Barrier {
    unsigned arrived = 0, expected = 0;  // threads
    std::vector<uint32_t> clocks;
    // Who waited when it last opened, and since when by its clock.
    struct Opened {
      int warp;
      uint32_t clock;
    };
    std::vector<Opened> opened;
  };

  // Others might have come in the place of a warp that nothing keeps from coming before the last opening.
  void check_whose(const Warp& warp, const Instruction& i, uint32_t id, unsigned expected) const {
    const auto& opened = barriers_[id].opened;
    if (opened.empty() || expected == kLanes) return;
    const std::vector<uint32_t> clocks = shared_.clocks(warp.index);
    std::string those;
    for (const auto& [other, clock] : opened) {
      if (other == warp.index || clocks[static_cast<size_t>(other)] >= clock) return;
      those += (those.empty() ? "" : ", ") + std::to_string(other);
    }
    warp.fault(i, "barrier " + std::to_string(id) + " of " + std::to_string(expected) +
                      " threads: nothing tells whether the warp comes before it last opened, for warps " + those);
  }

  void arrive(Warp& warp, const Instruction& i, bool waits) {
    const uint32_t id = warp.get<uint32_t>(i.args[0], first_lane(warp.lanes));
    const unsigned all = (warp.launch.block.count() + kLanes - 1) / kLanes * kLanes;
    const unsigned expected = i.num_args > 1 ? warp.get<uint32_t>(i.args[1], first_lane(warp.lanes)) : all;
    if (id >= kBarriers || expected == 0 || expected % kLanes != 0 || expected > all) {
      warp.fault(i, "barrier " + std::to_string(id) + " of " + std::to_string(expected) + " threads");
    }
    Barrier& barrier = barriers_[id];
    if (barrier.arrived > 0 && barrier.expected != expected) {
      warp.fault(i, "barrier " + std::to_string(id) + " of " + std::to_string(expected) + " threads, others came for " +
                        std::to_string(barrier.expected));
    }
    check_whose(warp, i, id, expected);
    barrier.expected = expected;
    barrier.arrived += kLanes;
    warp.barrier = static_cast<int>(id);
    const std::vector<uint32_t> clocks = shared_.clocks(warp.index);
    barrier.clocks.resize(clocks.size());
    std::transform(clocks.begin(), clocks.end(), barrier.clocks.begin(), barrier.clocks.begin(),
                   [](uint32_t a, uint32_t b) { return std::max(a, b); });
    if (!waits) shared_.tick(warp.index);
    if (barrier.arrived >= barrier.expected) open(static_cast<int>(id));
  }

  void open(int id) {
    std::vector<Barrier::Opened> opened;
    for (Warp& warp : warps_) {
      if (!warp.waits || warp.barrier != id) continue;
      shared_.join(warp.index, barriers_[id].clocks);
      shared_.tick(warp.index);
      opened.push_back({warp.index, shared_.clocks(warp.index)[static_cast<size_t>(warp.index)]});
      warp.waits = false;
    }
    barriers_[id] = {};
    barriers_[id].opened = std::move(opened);
  }

  // A GPU would wait for ever for registers that no warp has given back.
  void check_registers() const {
    const Warp* last = nullptr;
    int all = 0;
    for (const Warp& warp : warps_) {
      all += warp.registers;
      if (warp.sets_registers != nullptr && (last == nullptr || warp.registers > last->registers)) last = &warp;
    }
    const int most = warps_.front().registers_at_first() * static_cast<int>(warps_.size());
    if (last == nullptr || all <= most) return;
    last->fault(*last->sets_registers, "the warps of the block want " + std::to_string(all * kLanes) +
                                           " registers, it has " + std::to_string(most * kLanes));
  }

  [[noreturn]] void never_opens() const {
    std::string text = "barrier never opens";
    const Warp* first = nullptr;
    for (const Warp& warp : warps_) {
      text += "; warp " + std::to_string(warp.index);
      if (warp.groups.empty()) {
        text += " has ended";
        continue;
      }
      text += " waits at " + warp.launch.module.place(warp.stands->place);
      if (!first) first = &warp;
    }
    first->fault(*first->stands, text);
  }

  SharedMemory shared_;
  std::vector<Warpgroup> groups_;
  std::vector<Warp> warps_;
  Barrier barriers_[kBarriers];
};

void check_shape(const Kernel& kernel, const Shape& shape, int shared_bytes, int most_shared_bytes,
                 size_t parameter_bytes) {
  const auto refuse = [&](const std::string& what) { throw Fault("launch of " + kernel.name + ": " + what); };
  const Dim3 &g = shape.grid, &b = shape.block;
  if (g.x == 0 || g.y == 0 || g.z == 0 || b.count() == 0) refuse("a size of the grid or of the block is 0");
  if (g.x > INT32_MAX) refuse("grid.x is " + std::to_string(g.x) + ", at most 2^31 - 1");
  if (g.y > 65535 || g.z > 65535)
    refuse("grid.y is " + std::to_string(g.y) + ", grid.z is " + std::to_string(g.z) + ", at most 65535");
  const unsigned most = static_cast<unsigned>(std::min(kernel.most_threads, 1024));
  if (b.x > most || b.y > most || b.z > 64 || b.count() > most) {
    refuse(std::to_string(b.x) + " x " + std::to_string(b.y) + " x " + std::to_string(b.z) +
           " threads in a block, at most " + std::to_string(most));
  }
  if (shared_bytes > most_shared_bytes)
    refuse(std::to_string(shared_bytes) + " bytes of shared memory, at most " + std::to_string(most_shared_bytes));
  if (parameter_bytes != static_cast<size_t>(kernel.parameter_bytes)) {
    refuse(std::to_string(parameter_bytes) + " bytes of parameters, it takes " +
           std::to_string(kernel.parameter_bytes));
  }
}

}  // namespace

void run(const Module& module, const Kernel& kernel, const Shape& shape, const std::vector<unsigned char>& parameters,
         DeviceMemory& memory, Counters& counters) {
  const int shared_bytes = kernel.shared_bytes + shape.dynamic_shared_bytes;
  check_shape(kernel, shape, shared_bytes, most_shared_bytes(module), parameters.size());
  Launch launch{module,      kernel,       shape.grid,
                shape.block, shared_bytes, parameters,
                memory,      counters,     std::vector<uint64_t>(kernel.code.size())};
  for (const std::vector<uint64_t>& variable : module.globals) {
    if (!memory.contains(variable.data(), variable.size() * 8)) {
      memory.lend(const_cast<uint64_t*>(variable.data()), variable.size() * 8, true);
    }
  }
  memory.begin_launch(uint64_t{shape.grid.x} * shape.grid.y * shape.grid.z);
  BlockRun block(launch, static_cast<int>((shape.block.count() + kLanes - 1) / kLanes));
  uint32_t number = 0;
  for (unsigned z = 0; z < shape.grid.z; ++z) {
    for (unsigned y = 0; y < shape.grid.y; ++y) {
      for (unsigned x = 0; x < shape.grid.x; ++x) block.run({x, y, z}, number++);
    }
  }
  for (size_t n = 0; n < kernel.code.size(); ++n) {
    counters.instructions += launch.executed[n];
    counters.by_opcode[*kernel.code[n].name] += launch.executed[n];
  }
}

}  // namespace cuda_sim
