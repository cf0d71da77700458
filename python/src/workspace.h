// Scratch memory of calls from Python.
#pragma once

#include "polyhead/attention.h"

namespace polyhead::python {

// plan.forward(args) and plan.backward(args) in memory of this thread's own, which grows to what the largest call so
// far needed and is freed when the thread ends. A call that needs more than 64 MiB gets memory of its own, freed at its
// end.
Status forward_with_workspace(const Plan& plan, ForwardArgs& args);
Status backward_with_workspace(const Plan& plan, BackwardArgs& args);

}  // namespace polyhead::python
