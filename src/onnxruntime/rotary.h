// Rotary positions (Su et al. 2021, arXiv:2104.09864) as GroupQueryAttention has them.
#pragma once

#include "call.h"

namespace polyhead::onnxruntime {

struct Rotary {
  Tensor cos = {},
         sin = {};        // [positions, pairs], in the operands' dtype; of each head the first 2 * pairs elements turn
  Tensor positions = {};  // int64 [batch, sequence], rows of cos and sin
  bool interleaved = false;  // pair p is 2 p and 2 p + 1, or else p and p + pairs
};

// The tables, and for each query and new key its position: those given, or before[b] + i.
Status read_rotary(Call& call, const Tensor& query, const Tensor& before, Rotary& rotary);

// x [batch, sequence, heads, dim] turned, in memory of the call; rounded once.
Status turn(Call& call, const Rotary& rotary, Tensor& x);

}  // namespace polyhead::onnxruntime
