// Random programs: any words of the language in any order, of values that stay within bounds, so that what a kernel makes
// of them can be compared with what float64 makes.
#pragma once

#include "programs.h"

namespace polyhead::testing {

// Captures of these sizes; `score` and `mask`, the second telling, are not there.
NamedProgram random_program(Random& random, const Sizes4& sizes);

}  // namespace polyhead::testing
