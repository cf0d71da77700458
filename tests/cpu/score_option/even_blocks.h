// An option of the scores for the tests, with all that an option may have: it hides blocks of keys and keys of blocks, and
// its score depends on the place and is not linear.
//   S' = S + tanh(S) / 2 + parity_bias[h, (i + j) % 2], of keys j in even blocks of 128 whose j % 4 is not 3
#pragma once

#include "cpu/attention/score/option.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

struct EvenBlocks : Option {
  struct Memory {
    float* kept;  // dS' / dS
  };
  using Kept = KeepsNumber;
  static constexpr bool kHides = true;

  float even_bias, odd_bias;

  EvenBlocks(const Problem& problem, const Sequence&, int64_t, int64_t h) {
    const Tensor& parity_bias = problem.captures[0];
    const float* const row = static_cast<const float*>(parity_bias.data) + h * parity_bias.strides[0];
    even_bias = row[0], odd_bias = row[parity_bias.strides[1]];
  }

  bool on() const { return true; }
  bool may_hide() const { return true; }
  bool may_see(const Queries&, const Keys& keys) const { return (keys.first + keys.begin) / 128 % 2 == 0; }
  bool hides(const View&) const { return true; }

  static int64_t memory_floats(const Asked& asked) { return asked.gradients ? kTileFloats : 0; }
  void take_memory(Memory& own, float*& memory, bool gradients) const {
    own.kept = gradients ? take(memory, kTileFloats) : nullptr;
  }
  float* kept_tile(const Memory& own) const { return own.kept; }

  M sees(M seen, const auto& at, const View&) const {
    const M even = less_int(and_int(at.keys(), broadcast_int(128)), broadcast_int(1));
    return both(seen, both(even, less_int(and_int(at.keys(), broadcast_int(3)), broadcast_int(3))));
  }

  F score(F s, const auto& at, const View& view, Kept& kept) const {
    const F is_odd = to_float(and_int(add_int(at.queries(), at.keys()), broadcast_int(1)));
    const F t = tanh(s);
    kept.number = fma(t * broadcast(-0.5f), t, broadcast(1.5f));
    const F bias = is_odd * broadcast(odd_bias) + (broadcast(1.0f) - is_odd) * broadcast(even_bias);
    const F score = fma(t, broadcast(0.5f), s) + bias;
    return select(sees(mask_from_bits(~0u), at, view), score, broadcast(-kInfinity));
  }

  F raw_gradient(F ds, const auto&, const View&, const Kept& kept) const { return ds * kept.number; }
};

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
