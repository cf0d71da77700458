// Products, epilogues and norms on the CPU: calls cut into tasks.
#pragma once

#include "cpu/linear/functions.h"
#include "polyhead/executor.h"

namespace polyhead::cpu {

size_t packed_bytes(const LinearFunctions& functions, int64_t k, int64_t n, DType dtype);
void pack(const LinearFunctions& functions, const Matrix& b, void* packed, Executor& executor);

size_t gemm_workspace_bytes(const LinearFunctions& functions, const linear::GemmDesc& desc, int num_threads);
void gemm(const LinearFunctions& functions, const linear::GemmDesc& desc, const linear::GemmArgs& args,
          Executor& executor);

size_t sums_workspace_bytes(int64_t m, int64_t n);
void pointwise(const LinearFunctions& functions, const linear::PointwiseArgs& args, Executor& executor);
void norm_forward(const LinearFunctions& functions, const linear::NormForwardArgs& args, Executor& executor);
void norm_backward(const LinearFunctions& functions, const linear::NormBackwardArgs& args, Executor& executor);

// The matrix with dims that continue each other joined into one.
Matrix collapsed(const Matrix& x);

EpilogueWork epilogue_work(const linear::Epilogue& epilogue, const Axis& rows);

}  // namespace polyhead::cpu
