// The kernels of src/linear: which dtype each takes.
#include "cpu/linear/kernels.h"

#include "cpu/isa/isa.h"
#include "cpu/linear/tasks.h"

namespace polyhead::linear {
namespace {

std::string why_not_here(DType dtype, bool has_isa, const char* missing) {
  if (!has_isa) return std::string("this CPU has no ") + missing;
  if (dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16) return "";
  return std::string("dtype is ") + dtype_name(dtype) + ", takes float32, bfloat16 or float16";
}

template <const cpu::LinearFunctions& functions>
constexpr Kernel kernel(const char* name, std::string (*why_not)(DType dtype)) {
  return {name,
          why_not,
          [](int64_t k, int64_t n, DType dtype) { return cpu::packed_bytes(functions, k, n, dtype); },
          [](const Matrix& b, void* packed, Executor& executor) { cpu::pack(functions, b, packed, executor); },
          [] { return int64_t{functions.panel_columns}; },
          [](const GemmDesc& desc, int num_threads) { return cpu::gemm_workspace_bytes(functions, desc, num_threads); },
          [](const GemmDesc& desc, const GemmArgs& args, Executor& e) { cpu::gemm(functions, desc, args, e); },
          [](int64_t m, int64_t n, DType) { return cpu::sums_workspace_bytes(m, n); },
          [](const PointwiseArgs& args, Executor& executor) { cpu::pointwise(functions, args, executor); },
          [](const NormForwardArgs& args, Executor& executor) { cpu::norm_forward(functions, args, executor); },
          [](const NormBackwardArgs& args, Executor& executor) { cpu::norm_backward(functions, args, executor); }};
}

}  // namespace

constexpr Kernel kCpuGeneric =
    kernel<cpu::generic::kLinearFunctions>("cpu_generic", [](DType dtype) { return why_not_here(dtype, true, ""); });
#if defined(__x86_64__)
constexpr Kernel kCpuAvx2 = kernel<cpu::avx2::kLinearFunctions>(
    "cpu_avx2", [](DType dtype) { return why_not_here(dtype, cpu::isa().avx2, "AVX2 with FMA and F16C"); });
constexpr Kernel kCpuAvx512 = kernel<cpu::avx512::kLinearFunctions>(
    "cpu_avx512", [](DType dtype) { return why_not_here(dtype, cpu::isa().avx512, "AVX-512 (F, BW, DQ, VL)"); });
constexpr Kernel kCpuAvx512Bf16 = kernel<cpu::avx512bf16::kLinearFunctions>(
    "cpu_avx512bf16", [](DType dtype) { return why_not_here(dtype, cpu::isa().avx512bf16, "AVX512_BF16"); });
#endif

}  // namespace polyhead::linear
