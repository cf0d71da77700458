// The definition of attention, in code: the contract of include/polyhead/attention.h in naive loops, never tuned.
#pragma once

#include "core/memory_size.h"
#include "polyhead/attention.h"

namespace polyhead::reference {

// T = double is the spec; T = float the yardstick of error: every operation in float32 on the given inputs, one term
// after the other in index order. Results are rounded to the dtype of the tensor that takes them, which may be wider
// than the contract's (float64 `out` of a bfloat16 problem shows the unrounded result).
// `args` must fit `desc`, lengths and offsets included: those of a call that came through a plan. args.workspace is used if it has workspace_bytes<T>().
//
// Where the formula leaves it open: a hidden key has weight 0 also in a row that is NaN, so returned weights and column
// sums of hidden keys never become NaN; a dropped weight is multiplied by 0, so NaN stays NaN.
template <class T>
void forward(const AttentionDesc& desc, const ForwardArgs& args);

template <class T>
MemorySize workspace_bytes(const AttentionDesc& desc);

// Gradients with O and L as given in args.forward.out and .logsumexp; likewise with backward_workspace_bytes<T>().
template <class T>
void backward(const AttentionDesc& desc, const BackwardArgs& args);

template <class T>
MemorySize backward_workspace_bytes(const AttentionDesc& desc);

// The same in a workspace that is large enough; lengths and offsets are checked first, and on an error nothing is written.
template <class T>
Status forward_checked(const AttentionDesc& desc, const ForwardArgs& args, void* workspace);
template <class T>
Status backward_checked(const AttentionDesc& desc, const BackwardArgs& args, void* workspace);

}  // namespace polyhead::reference

namespace polyhead {

struct Kernel;
extern const Kernel kReference;  // forward<double> for every dtype

}  // namespace polyhead
