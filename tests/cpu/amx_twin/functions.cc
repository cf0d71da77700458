// The tables of the twin's functions, which src/cpu/isa/list.h does not name.
#include "cpu/attention/functions.h"

#include "cpu/linear/functions.h"

namespace polyhead::cpu::amx_twin {
extern const IsaFunctions kFunctions, kFloat32Functions;
extern const LinearFunctions kLinearFunctions;
}  // namespace polyhead::cpu::amx_twin

#include "cpu/attention/functions.cc"
#include "cpu/linear/gemm.cc"
