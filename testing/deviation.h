// How far the rounding errors of honest arithmetic stray, for each element of each result: their variance, if every
// operation of the naive formula errs at random by up to half an ulp, independently of the others, carried to the results
// by first derivatives (the probabilistic rounding analysis of Higham and Mary, 2019). What the naive formula errs by on
// given numbers is one draw from that: of few elements, or of numbers for which it happens to be exact, it says nothing.
//
// The rounding of a result to its own dtype is not part of it. Tensor cores shift sums besides (bounds.h), by what is
// carried to the results likewise.
#pragma once

#include "testing/definition.h"

namespace polyhead::testing {

ForwardVariance forward_variance(const AttentionDesc& desc, const Inputs& in, const Visibility& seen,
                                 const Outputs& exact);
GradientVariance backward_variance(const AttentionDesc& desc, const BackwardInputs& in, const Visibility& seen);

}  // namespace polyhead::testing
