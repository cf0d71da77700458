// Products, epilogues and norms on the CPU: calls cut into tasks.
#pragma once

#include "core/memory_size.h"
#include "core/threads.h"
#include "cpu/linear/functions.h"

namespace polyhead::cpu {

MemorySize packed_bytes(const LinearFunctions& functions, int64_t k, int64_t n, DType dtype);
void pack(const LinearFunctions& functions, const Matrix& b, void* packed, const Run& run);

MemorySize gemm_workspace_bytes(const LinearFunctions& functions, const linear::GemmDesc& desc, int num_threads);
void gemm(const LinearFunctions& functions, const linear::GemmDesc& desc, const linear::GemmArgs& args, const Run& run);

MemorySize sums_workspace_bytes(int64_t m, int64_t n);
void pointwise(const LinearFunctions& functions, const linear::PointwiseArgs& args, const Run& run);
void norm_forward(const LinearFunctions& functions, const linear::NormForwardArgs& args, const Run& run);
void norm_backward(const LinearFunctions& functions, const linear::NormBackwardArgs& args, const Run& run);

// The matrix with dims that continue each other joined into one.
Matrix collapsed(const Matrix& x);

EpilogueWork epilogue_work(const linear::Epilogue& epilogue, const Axis& rows);

Status copy_rows(const linear::CopyRowsArgs& args, const Run& run);
Status sum_heads(const linear::SumHeadsArgs& args, const Run& run);
Status clear(void* data, size_t bytes, const Run& run);

}  // namespace polyhead::cpu
