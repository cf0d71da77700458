// How fast one instruction set multiplies and adds on registers alone.
#pragma once

#include <cstdint>

#include "cpu/isa/list.h"
#include "polyhead/tensor.h"

namespace polyhead::cpu {

// Multiply-adds, `rounds` times, in float32 or (where the set has them) bfloat16 pairs. Returns how many FLOPs that was;
// 0 where it has no such instruction. `sink` takes a value that needs them.
using PeakLoop = double(DType dtype, int64_t rounds, float* sink);

#define DECLARE(name, features) \
  namespace name {              \
  PeakLoop peak_loop;           \
  }
POLYHEAD_ISAS(DECLARE)
#undef DECLARE

}  // namespace polyhead::cpu
