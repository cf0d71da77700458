// The door for callers inside the library, who have checked their own operands: a layer checks once, not once more for
// each of its steps.
#pragma once

#include "polyhead/attention.h"

namespace polyhead {

// As Plan::forward and Plan::backward, but the shapes, strides, pointers, overlaps and the workspace of `args` are taken
// as fitting, args.where too. Data is checked as always, by the kernel: an error comes before any output is touched.
Status forward_unchecked(const Plan& plan, const ForwardArgs& args);
Status backward_unchecked(const Plan& plan, const BackwardArgs& args);

// As plan(), without the line that it prints where POLYHEAD_VERBOSE asks for it: who has a line of his own.
Result<Plan> make_plan(const AttentionDesc& desc, const PlanOptions& options);

}  // namespace polyhead
