// What a call should give: attention and its gradients as the contract defines them, by plain loops that share no code
// with src/reference or any kernel. Each sum has the order that src/reference gives it, and so the same bits; the kernel
// `reference` is held to them, which shows that the two agree.
#pragma once

#include "testing/operands.h"

namespace polyhead::testing {

// What one forward call wrote, densely stored, and what it must not have done. Without a softmax the definition's logsumexp
// only tells the rows that see no key, -inf, from the others, 0; a call has none.
struct Outputs {
  Array out, logsumexp, attn_weights, column_sums;
  std::vector<std::string> faults;  // elements not written, gaps or inputs written
};

// Of logsumexp and column sums.
DType statistics_dtype(const AttentionDesc& desc);

struct OutputDims {
  std::vector<int64_t> out, logsumexp, attn_weights, column_sums;  // empty: not asked for
};
OutputDims output_dims(const AttentionDesc& desc, bool logsumexp);

// All outputs, in arithmetic of T (double or float). wide: results in float64, whatever their dtype should be.
// magnitude: null, or where sum_k P_k |V_k| goes, float64, for each element of `out`.
template <class T>
Outputs defined_outputs(const AttentionDesc& desc, const Inputs& in, const Visibility& seen, bool wide,
                        Array* magnitude = nullptr);

// All gradients, likewise.
template <class T>
Gradients defined_gradients(const AttentionDesc& desc, const BackwardInputs& in, const Visibility& seen, bool wide);

// For each element the sum of the absolute values of its terms, in float64. With
//   a_ij = P_ij (f_ij sum_d |dO_id V_jd| + sum_d |dO_id O_id| + |dL_i|)       x_ij = a_ij (1 - tanh^2(X_ij / softcap))
// (without a softmax a_ij = f_ij sum_d |dO_id V_jd|)
// they are |scale| sum_j x_ij |K_j|, |scale| sum_i x_ij |Q_i|, sum_i P_ij f_ij |dO_i|, sum a_ij and
// sum a_ij |i + offset - j|, and of sinks sum_i exp(sink - L_i) (sum_d |dO_id O_id| + |dL_i|), each plus what the gradient held before. P counts as 2^-104 at least, of which 4 ulp are
// 2^-126: a weight below float32's normal numbers may be taken for 0.
Gradients gradient_magnitudes(const AttentionDesc& desc, const BackwardInputs& in, const Visibility& seen);

// How much an honest kernel errs (deviation.h): the variance of the rounding errors of each element, float64. Of those that
// multiply pairs of bfloat16, `pairs` comes on top; not given in other dtypes. cut: what tensor cores shift an element by,
// all of them towards 0; not given but of 16-bit inputs.
struct ForwardVariance {
  Array out, logsumexp, attn_weights, column_sums, pairs_out, cut_out, cut_logsumexp;
};
struct GradientVariance {
  Gradients arithmetic, pairs, cut;
};

// What a kernel is judged by.
struct Expected {
  Outputs exact;    // float64 arithmetic and results
  Outputs naive;    // the yardstick: float32 arithmetic (float64 with float64 inputs), results in their own dtypes
  Array magnitude;  // sum_k P_k |V_k|, float64, for each element of `out`
  ForwardVariance variance;
};
Expected expected(const AttentionDesc& desc, const Inputs& in);

struct ExpectedGradients {
  Gradients exact, naive;  // likewise
  Gradients magnitude;     // for each element the sum of the absolute values of its terms, float64
  GradientVariance variance;
  VisibleParts seen;  // what a gradient may differ from 0 by
};
ExpectedGradients expected(const AttentionDesc& desc, const BackwardInputs& in);

}  // namespace polyhead::testing
