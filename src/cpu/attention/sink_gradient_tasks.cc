// dsink_h = sum over the queries of exp(sink_h - L_i) (dL_i - D_i), D_i = dO_i . O_i or delta: a head's in order, in float64.
// Reading O and dO once more costs less than 1 % of backward, whatever the instruction set.
#include "cpu/attention/sink_gradient_tasks.h"

#include <cmath>

#include "core/dtype.h"
#include "core/threads.h"
#include "cpu/attention/call.h"

namespace polyhead::cpu {
namespace {

// 0 where all of O is: a grad_out that no value came to does not reach the sink, if it is NaN.
template <class Element>
double dot(const Operand& grad_out, const Operand& out, int64_t b, int64_t h, int64_t row, int64_t dim) {
  const auto first = [&](const Operand& x) {
    return static_cast<const Element*>(x.data) + b * x.stride_b + h * x.stride_h + row * x.stride_s;
  };
  const Element *dO = first(grad_out), *O = first(out);
  double sum = 0;
  bool some = false;
  for (int64_t d = 0; d < dim; ++d) {
    const auto o = widen<double>(O[d * out.stride_d]);
    sum += widen<double>(dO[d * grad_out.stride_d]) * o;
    some = some || o != 0;
  }
  return some ? sum : 0;
}

template <class Element>
double sum_of_head(const BackwardProblem& p, const Sequence& s, int64_t b, int64_t h) {
  const Problem& problem = p.forward;
  const auto number = [&](const Statistic& x, int64_t row) { return static_cast<double>(*at(x, b, h, row)); };
  double sum = 0;
  for (int64_t row = s.first_q; row < s.first_q + s.len_q; ++row) {
    const double D = p.delta.data != nullptr ? number(p.delta, row)
                                             : dot<Element>(p.grad_out, problem.out, b, h, row, problem.head_dim_v);
    const double dL = p.grad_logsumexp.data != nullptr ? number(p.grad_logsumexp, row) : 0;
    sum += std::exp(static_cast<double>(sink_of(problem, h)) - number(problem.logsumexp, row)) * (dL - D);
  }
  return sum;
}

}  // namespace

void sink_gradients_backward(const AttentionDesc& desc, const BackwardArgs& args, const Sequences& sequences,
                             const Run& run) {
  const BackwardProblem p = backward_problem(desc, args);
  run_tasks(run, desc.num_heads, [&](int64_t h, int) {
    double sum = 0;
    with_element_type(out_dtype(desc), [&]<class Element>(Element) {
      for (int64_t b = 0; b < desc.batch && sink_of(p.forward, h) != -INFINITY; ++b) {
        sum += sum_of_head<Element>(p, sequences[b], b, h);
      }
    });
    const Tensor& to = args.grad_sink_logits;
    const int64_t at = h * to.strides[0];
    if (args.accumulate) sum += load_element(to.data, to.dtype, at);
    store_element(to.data, to.dtype, at, sum);
  });
}

}  // namespace polyhead::cpu
