// The kernel that one instruction set's functions for products make.
#pragma once

#include <string>

#include "contract/linear.h"
#include "cpu/linear/functions.h"
#include "cpu/linear/tasks.h"

namespace polyhead::cpu {

// here: why the set cannot run on this machine, or "".
template <std::string (*here)(), const LinearFunctions& functions>
std::string why_no_product(DType dtype) {
  if (std::string reason = here(); !reason.empty()) return reason;
  if (functions.tmm && dtype != DType::kBFloat16) {
    return std::string("dtype is ") + dtype_name(dtype) + ", takes bfloat16";
  }
  if (dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16) return "";
  return std::string("dtype is ") + dtype_name(dtype) + ", takes float32, bfloat16 or float16";
}

template <std::string (*here)(), const LinearFunctions& functions>
constexpr linear::Kernel product_kernel_of(const char* name) {
  return {
      name,
      Device::kCpu,
      why_no_product<here, functions>,
      [](int64_t k, int64_t n, DType dtype) { return packed_bytes(functions, k, n, dtype); },
      [](const Matrix& b, void* packed, const Run& run) {
        pack(functions, b, packed, run);
        return Status();
      },
      [] { return int64_t{functions.panel_columns}; },
      [](const linear::GemmDesc& desc, int num_threads) { return gemm_workspace_bytes(functions, desc, num_threads); },
      [](const linear::GemmDesc& desc, const linear::GemmArgs& args, const Run& run) {
        gemm(functions, desc, args, run);
        return Status();
      },
      [](int64_t m, int64_t n, DType) { return sums_workspace_bytes(m, n); },
      [](const linear::PointwiseArgs& args, const Run& run) {
        pointwise(functions, args, run);
        return Status();
      },
      [](const linear::NormForwardArgs& args, const Run& run) {
        norm_forward(functions, args, run);
        return Status();
      },
      [](const linear::NormBackwardArgs& args, const Run& run) {
        norm_backward(functions, args, run);
        return Status();
      },
      copy_rows,
      sum_heads,
      clear};
}

}  // namespace polyhead::cpu
