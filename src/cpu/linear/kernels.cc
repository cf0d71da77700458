// The kernels of src/linear: which dtype each takes.
#include "cpu/linear/kernels.h"

#include "cpu/isa/isa.h"
#include "cpu/linear/tasks.h"

namespace polyhead::linear {
namespace {

template <cpu::Isa isa>
std::string why_not(DType dtype) {
  if (!cpu::has(isa)) return cpu::why_not(isa);
  if (dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16) return "";
  return std::string("dtype is ") + dtype_name(dtype) + ", takes float32, bfloat16 or float16";
}

template <cpu::Isa isa, const cpu::LinearFunctions& functions>
constexpr Kernel kernel(const char* name) {
  return {name,
          why_not<isa>,
          [](int64_t k, int64_t n, DType dtype) { return cpu::packed_bytes(functions, k, n, dtype); },
          [](const Matrix& b, void* packed, const Run& run) { cpu::pack(functions, b, packed, run); },
          [] { return int64_t{functions.panel_columns}; },
          [](const GemmDesc& desc, int num_threads) { return cpu::gemm_workspace_bytes(functions, desc, num_threads); },
          [](const GemmDesc& desc, const GemmArgs& args, const Run& run) { cpu::gemm(functions, desc, args, run); },
          [](int64_t m, int64_t n, DType) { return cpu::sums_workspace_bytes(m, n); },
          [](const PointwiseArgs& args, const Run& run) { cpu::pointwise(functions, args, run); },
          [](const NormForwardArgs& args, const Run& run) { cpu::norm_forward(functions, args, run); },
          [](const NormBackwardArgs& args, const Run& run) { cpu::norm_backward(functions, args, run); }};
}

}  // namespace

#define ROW(name, features) kernel<cpu::Isa::name, cpu::name::kLinearFunctions>("cpu_" #name),
constexpr Kernel kCpuKernels[] = {POLYHEAD_ISAS(ROW)};
#undef ROW

}  // namespace polyhead::linear
