// cpu_amx with its tile registers in software: what tests run where no CPU has them.
#include "cpu/attention/kernel_of.h"
#include "cpu/isa/isa.h"
#include "cpu/linear/kernel_of.h"

namespace polyhead {

namespace cpu::amx_twin {
extern const IsaFunctions kFunctions;
extern const LinearFunctions kLinearFunctions;
}  // namespace cpu::amx_twin

static std::string here() { return cpu::why_not(cpu::Isa::avx2); }

extern const Kernel kAmxTwin;
const Kernel kAmxTwin = cpu::kernel_of<here, cpu::amx_twin::kFunctions>("cpu_amx_twin");

namespace linear {
extern const Kernel kAmxTwin;
const Kernel kAmxTwin = cpu::product_kernel_of<here, cpu::amx_twin::kLinearFunctions>("cpu_amx_twin");
}  // namespace linear

}  // namespace polyhead
