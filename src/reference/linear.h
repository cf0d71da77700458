// The definition of linear.h's operations, in naive loops that are never tuned.
#pragma once

#include "contract/linear.h"

namespace polyhead::linear {

extern const Kernel kReference;  // T = double for every dtype

// T = double is the spec; T = float the yardstick of error: every operation in float32 on the given numbers, one term
// after the other in index order. Results are rounded to the dtype of the matrix that takes them.
namespace reference {

template <class T>
void gemm(const GemmDesc& desc, const GemmArgs& args);  // never packed

template <class T>
void pointwise(const PointwiseArgs& args);

template <class T>
void norm_forward(const NormForwardArgs& args);

template <class T>
void norm_backward(const NormBackwardArgs& args);

}  // namespace reference
}  // namespace polyhead::linear
