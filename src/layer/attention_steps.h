// Attention as a step of a layer: its arguments are the layer's (arguments.h), one call for each beam.
#pragma once

#include <functional>

#include "layer/steps.h"

namespace polyhead {

// Lengths, offsets and pages of beam n, as attention takes them: those tensors alone.
ForwardArgs sequence_args(const Call& call, int64_t n);

// What a program captures, and that its indices stay within in `beams` beams; the workspace has been checked. `list` is of
// one step of decoding where the call is.
Status check_program(const AttentionDesc& asked, const StepList& list, const Call& call, int64_t beams);

Status attend(const AttentionStep& step, const Machine& machine, const Call& call, char* scratch);

// `add(from, to, accumulate)`: to = or += from.
using AddTensors = std::function<Status(const Tensor& from, const Tensor& to, bool accumulate)>;
Status attend_backward(const AttentionBackwardStep& step, const Machine& machine, const Call& call, char* scratch,
                       const AddTensors& add);

}  // namespace polyhead
