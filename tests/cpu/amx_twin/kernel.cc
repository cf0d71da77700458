// cpu_amx with its tile registers in software: what tests run where no CPU has them.
#include "cpu/attention/kernel_of.h"
#include "cpu/isa/isa.h"
#include "cpu/linear/kernel_of.h"

namespace polyhead {

namespace cpu::amx_twin {
extern const IsaFunctions kFunctions, kFloat32Functions;
extern const LinearFunctions kLinearFunctions;
}  // namespace cpu::amx_twin

static std::string here() { return cpu::why_not(cpu::Isa::avx2); }

extern const Kernel kAmxTwin;
const Kernel kAmxTwin = cpu::kernel_of<here, cpu::amx_twin::kFunctions, cpu::leaves_of_pairs>("cpu_amx_twin");

extern const Kernel kAmxTwinFloat32;
const Kernel kAmxTwinFloat32 =
    cpu::kernel_of<here, cpu::amx_twin::kFloat32Functions, cpu::leaves_of_planes>("cpu_amx_twin_float32");

namespace linear {
extern const Kernel kAmxTwin;
const Kernel kAmxTwin = cpu::product_kernel_of<here, cpu::amx_twin::kLinearFunctions>("cpu_amx_twin");

extern const Kernel kAmxTwinFloat32;
const Kernel kAmxTwinFloat32 = cpu::product_kernel_of<here, cpu::avx2::kLinearFunctions>("cpu_amx_twin_float32");
}  // namespace linear

}  // namespace polyhead
