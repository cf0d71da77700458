// The table of these kernels, which src/cpu/isa/list.h does not name.
#include "cpu/attention/functions.h"

namespace polyhead::cpu::with_option {
extern const IsaFunctions kFunctions;
}

#include "cpu/attention/functions.cc"
