// The kernels of src/linear: which dtype each takes.
#include "cpu/linear/kernels.h"

#include "cpu/isa/isa.h"
#include "cpu/linear/kernel_of.h"

namespace polyhead::linear {
namespace {

template <cpu::Isa isa>
std::string here() {
  return cpu::why_not(isa);
}

}  // namespace

#define ROW(name, features) cpu::product_kernel_of<here<cpu::Isa::name>, cpu::name::kLinearFunctions>("cpu_" #name),
constexpr Kernel kCpuKernels[] = {POLYHEAD_ISAS(ROW)};
#undef ROW
#ifdef __x86_64__
constexpr Kernel kAmxFloat32 =
    cpu::product_kernel_of<here<cpu::Isa::amx>, cpu::avx512bf16::kLinearFunctions>("cpu_amx_float32");
#endif

}  // namespace polyhead::linear
