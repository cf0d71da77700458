// S = softcap * tanh(S / softcap).
#pragma once

#include "cpu/attention/score/option.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

struct Softcap : Option {
  float cap;  // 0: none

  struct Memory {
    float* kept;  // 1 - tanh^2
  };
  using Kept = KeepsNumber;

  Softcap(const Problem& problem, const Sequence&, int64_t, int64_t) : cap(problem.softcap) {}

  bool on() const { return cap > 0; }

  static int64_t memory_floats(const Asked& asked) { return asked.softcap && asked.gradients ? kTileFloats : 0; }
  void take_memory(Memory& own, float*& memory, bool gradients) const {
    own.kept = gradients && on() ? take(memory, kTileFloats) : nullptr;
  }
  float* kept_tile(const Memory& own) const { return own.kept; }

  F score(F s, const auto&, const View&, Kept& kept) const {
    if (!on()) return s;
    const F t = tanh(s / broadcast(cap));
    kept.number = fma(broadcast(0.0f) - t, t, broadcast(1.0f));
    return broadcast(cap) * t;
  }

  F raw_gradient(F ds, const auto&, const View&, const Kept& kept) const { return on() ? ds * kept.number : ds; }
};

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
