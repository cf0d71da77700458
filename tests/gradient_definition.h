// The gradients as the contract defines them, quickly: the sums of src/reference/attention_backward.cc, each in the same
// order and so with the same bits, of scores that are computed once for each pair. gradient_test shows that they are.
#pragma once

#include "gradient_problem.h"
#include "poison.h"

namespace polyhead::testing {

// All gradients, in arithmetic of T (double or float). wide: results in float64, whatever their dtype should be.
template <class T>
Gradients defined_gradients(const AttentionDesc& desc, const BackwardInputs& in, const Visibility& seen, bool wide);

// For each element the sum of the absolute values of its terms, in float64. With
//   a_ij = P_ij (f_ij sum_d |dO_id V_jd| + sum_d |dO_id O_id| + |dL_i|)       x_ij = a_ij (1 - tanh^2(X_ij / softcap))
// they are |scale| sum_j x_ij |K_j|, |scale| sum_i x_ij |Q_i|, sum_i P_ij f_ij |dO_i|, sum a_ij and
// sum a_ij |i + offset - j|, each plus what the gradient held before. P counts as 2^-104 at least, of which 4 ulp are
// 2^-126: a weight below float32's normal numbers may be taken for 0.
Gradients gradient_magnitudes(const AttentionDesc& desc, const BackwardInputs& in, const Visibility& seen);

}  // namespace polyhead::testing
