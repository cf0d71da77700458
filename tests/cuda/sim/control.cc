// What lanes do together, and where they go: PTX ISA 9.0, "Control Flow", "Parallel Synchronization and Communication".
// Barriers, branches and exits are the scheduler's (run.cc); here are shuffles, votes and reductions.
#include <algorithm>

#include "opcodes.h"
#include "shared_memory.h"
#include "warp.h"

namespace cuda_sim {
namespace {

void nothing(Warp&, const Instruction&, uint32_t) {}

void trap(Warp& w, const Instruction& i, uint32_t mask) { w.fault(i, "the kernel traps", first_lane(mask)); }

void sync_warp(Warp& w, const Instruction& i, uint32_t mask) {
  if (mask != w.lanes) w.fault(i, "bar.warp.sync of some lanes of a warp is not modelled", first_lane(mask));
  w.shared.tick(w.index);
}

// shfl.sync.mode d[|p], a, b, c, members: c holds the clamp and, from bit 8, the mask of a segment.
template <char kMode>
void shuffle(Warp& w, const Instruction& i, uint32_t mask) {
  const int first = i.num_results;
  uint32_t result[kLanes] = {}, in_range = 0;
  for_lanes(mask, [&](int lane) {
    const int b = static_cast<int>(w.get<uint32_t>(i.args[first + 1], lane) & 0x1f);
    const uint32_t c = w.get<uint32_t>(i.args[first + 2], lane);
    const int clamp = static_cast<int>(c & 0x1f), segment = static_cast<int>(c >> 8 & 0x1f);
    const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
    int from = kMode == 'u' ? lane - b : kMode == 'd' ? lane + b : kMode == 'b' ? lane ^ b : least | (b & ~segment);
    const bool inside = kMode == 'u' ? from >= most : from <= most;
    if (!inside) from = lane;
    if (!(mask >> from & 1))
      w.fault(i, "shuffles from lane " + std::to_string(from) + ", which is not among the lanes that do", lane);
    result[lane] = w.get<uint32_t>(i.args[first], from);
    in_range |= static_cast<uint32_t>(inside) << lane;
  });
  for_lanes(mask, [&](int lane) { w.put<uint32_t>(i.args[0], lane, result[lane]); });
  if (first == 2) w.put<uint32_t>(i.args[1], 0, (w.predicate(i.args[1]) & ~mask) | (in_range & mask));
}

template <char kMode>
void vote(Warp& w, const Instruction& i, uint32_t mask) {
  const uint32_t yes = w.predicate(i, 1) & mask;
  if (kMode == 'b') return for_lanes(mask, [&](int lane) { w.put<uint32_t>(i.args[0], lane, yes); });
  const bool holds = kMode == 'l' ? yes == mask : kMode == 'y' ? yes != 0 : yes == mask || yes == 0;
  w.put<uint32_t>(i.args[0], 0, (w.predicate(i.args[0]) & ~mask) | (holds ? mask : 0));
}

template <class T, class Op>
void reduce(Warp& w, const Instruction& i, uint32_t mask) {
  T all = w.get<T>(i.args[1], first_lane(mask));
  for_lanes(mask & (mask - 1), [&](int lane) { all = Op::of(all, w.get<T>(i.args[1], lane)); });
  for_lanes(mask, [&](int lane) { w.put<T>(i.args[0], lane, all); });
}

struct Sum {
  static uint32_t of(uint32_t a, uint32_t b) { return a + b; }
};
struct Least {
  template <class T>
  static T of(T a, T b) {
    return std::min(a, b);
  }
};
struct Most {
  template <class T>
  static T of(T a, T b) {
    return std::max(a, b);
  }
};
struct All {
  static uint32_t of(uint32_t a, uint32_t b) { return a & b; }
};
struct Any {
  static uint32_t of(uint32_t a, uint32_t b) { return a | b; }
};
struct Odd {
  static uint32_t of(uint32_t a, uint32_t b) { return a ^ b; }
};

void active_mask(Warp& w, const Instruction& i, uint32_t mask) {
  for_lanes(mask, [&](int lane) { w.put<uint32_t>(i.args[0], lane, mask); });
}

}  // namespace

void add_warp_opcodes(OpcodeTable& t) {
  for (const char* uniform : {"", ".uni"}) {
    t[std::string("bra") + uniform] = {nothing, "=>", Kind::kBranch};
    t[std::string("ret") + uniform] = {nothing, "=", Kind::kExit};
  }
  t["exit"] = {nothing, "=", Kind::kExit};
  t["trap"] = {trap, "="};
  for (const char* name : {"bar.sync", "barrier.sync", "barrier.sync.aligned"}) {
    t[name] = {nothing, "=w", Kind::kBarrier};
    t[std::string(name) + "/2"] = {nothing, "=ww", Kind::kBarrier};
  }
  t["bar.arrive"] = {nothing, "=ww", Kind::kArrive};
  t["bar.warp.sync"] = {sync_warp, "=w", Kind::kMembers};
  t["activemask.b32"] = {active_mask, "w="};
  t["shfl.sync.up.b32"] = {shuffle<'u'>, "w=wwww", Kind::kMembers};
  t["shfl.sync.down.b32"] = {shuffle<'d'>, "w=wwww", Kind::kMembers};
  t["shfl.sync.bfly.b32"] = {shuffle<'b'>, "w=wwww", Kind::kMembers};
  t["shfl.sync.idx.b32"] = {shuffle<'i'>, "w=wwww", Kind::kMembers};
  for (const char* mode : {"up", "down", "bfly", "idx"}) {
    Opcode with_predicate = t[std::string("shfl.sync.") + mode + ".b32"];
    with_predicate.signature = "wp=wwww";
    t[std::string("shfl.sync.") + mode + ".b32|"] = with_predicate;
  }
  t["vote.sync.ballot.b32"] = {vote<'b'>, "w=pw", Kind::kMembers};
  t["vote.sync.all.pred"] = {vote<'l'>, "p=pw", Kind::kMembers};
  t["vote.sync.any.pred"] = {vote<'y'>, "p=pw", Kind::kMembers};
  t["vote.sync.uni.pred"] = {vote<'u'>, "p=pw", Kind::kMembers};
  t["redux.sync.add.s32"] = t["redux.sync.add.u32"] = {reduce<uint32_t, Sum>, "w=ww", Kind::kMembers};
  t["redux.sync.min.s32"] = {reduce<int32_t, Least>, "w=ww", Kind::kMembers};
  t["redux.sync.min.u32"] = {reduce<uint32_t, Least>, "w=ww", Kind::kMembers};
  t["redux.sync.max.s32"] = {reduce<int32_t, Most>, "w=ww", Kind::kMembers};
  t["redux.sync.max.u32"] = {reduce<uint32_t, Most>, "w=ww", Kind::kMembers};
  t["redux.sync.and.b32"] = {reduce<uint32_t, All>, "w=ww", Kind::kMembers};
  t["redux.sync.or.b32"] = {reduce<uint32_t, Any>, "w=ww", Kind::kMembers};
  t["redux.sync.xor.b32"] = {reduce<uint32_t, Odd>, "w=ww", Kind::kMembers};
}

}  // namespace cuda_sim
