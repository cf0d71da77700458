// Which instruction set's kernels are asked first on this machine.
#pragma once

#include "cpu/isa/list.h"

namespace polyhead::cpu {

struct IsaOrder {
  Isa isas[kNumIsas];       // every set of the list, best first
  char measured[128] = "";  // "measured: ...", where the order departs from the list's
};

// The list's order, but a set comes before another that the list prefers where it was measured to be kClearMargin times
// as fast. rates[i]: FLOP/s of the i-th set of the list in products of bfloat16; 0 where the list decides.
constexpr double kClearMargin = 1.2;
IsaOrder order_isas(const double (&rates)[kNumIsas]);

// This machine's order: measured at the first call, in less than a millisecond, and the same until the process ends.
//
// A flag does not tell how fast an instruction is: on Sapphire Rapids the product of bfloat16 pairs (vdpbf16ps) has half
// the rate of float32's multiply-add, on Zen 4 and 5 twice. So the sets that have such a product are measured against
// each other and against the best set that has none and multiplies in float32.
const IsaOrder& isa_order();

}  // namespace polyhead::cpu
