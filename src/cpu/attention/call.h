// A checked forward call in the CPU kernels' terms, and what is the same on every path through them.
#pragma once

#include "contract/sequences.h"
#include "cpu/attention/problem.h"

namespace polyhead::cpu {

Problem problem(const AttentionDesc& desc, const ForwardArgs& args);
BackwardProblem backward_problem(const AttentionDesc& desc, const BackwardArgs& args);

// Rows [first, end) of one head become 0.
void clear_rows(const Operand& x, int64_t b, int64_t h, int64_t first, int64_t end, int64_t dim);

// Rows [first, end) of one head that see nothing (padding; rows behind the last packed sequence): O = 0, L = -inf.
void hide_rows(const Problem& problem, int64_t b, int64_t h, int64_t first, int64_t end);

inline bool has_additive(const AttentionDesc& desc) { return desc.attn_mask.given || desc.attn_bias.given; }

}  // namespace polyhead::cpu
