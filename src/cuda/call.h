// How a call's tensors are told to kernels on the device.
#pragma once

#include "core/memory_size.h"
#include "cuda/problem.h"
#include "polyhead/attention.h"

namespace polyhead::cuda {

Number number_of(DType dtype);

// Blocks of threads in a grid that goes over queries, `rows` each, and over keys; too many if there are more than a grid may
// have.
MemorySize query_blocks(const AttentionDesc& desc, int64_t rows = kBlockRows);
MemorySize key_blocks(const AttentionDesc& desc, int64_t rows = kBlockRows);

// A tensor [batch, rows, heads, columns], or [rows, heads, columns], for kernels that compute with `elements`.
Rows rows_of(const Tensor& t, Number elements);
// The same as it is stored; `group` numbers share a scale, if there are some.
StoredRows stored_rows(const Tensor& t, const Tensor& scales, int64_t group);
// [batch, heads, rows], or [heads, rows]
Statistic statistic_of(const Tensor& t);
// A mask or bias, [1 or batch, 1 or num_heads, 1 or seqlen_q, 1 or seqlen_k].
Broadcast broadcast_of(const Tensor& t);
// [num_heads], or [batch, num_heads]
Broadcast slopes_of(const Tensor& t);
Captured captured(const Tensor& t);
// [n]
Integers integers(const Tensor& t);

// What tells where query 0 stands: of kFixed desc.query_offset, or 0.
Diagonal diagonal_of(const AttentionDesc& desc);

// All that both directions are told, computed in `dtype`.
void set_problem(const AttentionDesc& desc, const ForwardArgs& args, DType dtype, Problem* problem);

// Whether keys or values are stored in a format with scales, and how.
bool is_stored(const AttentionDesc& desc);
void set_stored(const AttentionDesc& desc, const ForwardArgs& args, StoredProblem* problem);

}  // namespace polyhead::cuda
