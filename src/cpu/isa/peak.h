// What the instruction sets do at best: multiply-adds of one thread on registers alone.
#pragma once

#include <cstdint>

#include "cpu/isa/list.h"
#include "polyhead/tensor.h"

namespace polyhead::cpu {

// Whether the set has a product of bfloat16 of its own. Without one it widens to float32.
bool multiplies_bf16(Isa isa);

// FLOP/s in `rounds` rounds of the set's product of `dtype`. Only where has(isa).
double peak_flops(Isa isa, DType dtype, int64_t rounds);

}  // namespace polyhead::cpu
