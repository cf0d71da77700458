// What the reference gives: exactly, and as the yardstick of error.
#include <cmath>

#include "layouter.h"
#include "reference/attention.h"
#include "verify.h"

namespace polyhead::tools {
namespace {

template <class T>
void run_reference(const AttentionDesc& desc, ForwardArgs args, const Outputs& outputs) {
  outputs.give_to(args);
  reference::forward<T>(desc, args);
}

template <class T>
void run_reference(const AttentionDesc& desc, BackwardArgs args, const Gradients& gradients) {
  gradients.give_to(args);
  reference::backward<T>(desc, args);
}

template <class Args, class Results>
void run_yardstick(const AttentionDesc& desc, const Args& args, const Results& results) {
  if (desc.dtype == DType::kFloat64) {
    run_reference<double>(desc, args, results);
  } else {
    run_reference<float>(desc, args, results);
  }
}

// Sets the elements of `to`, which has as many, to those of `from`, rounded to its dtype.
void copy(const Tensor& from, const Tensor& to) {
  const std::vector<double> all = element_values(from);
  size_t n = 0;
  fill(to, [&] { return all[n++]; });
}

// New memory for tensors that stand in for others.
class StandIns {
 public:
  // `factor` times the absolute value of each element.
  Status absolute(Tensor& tensor, double factor = 1) {
    if (!tensor.given()) return {};
    const std::vector<double> all = element_values(tensor);
    if (Status s = add_like(tensor, tensor.dims[tensor.ndim - 1], tensor); !s.ok()) return s;
    size_t n = 0;
    fill(tensor, [&] { return factor * std::fabs(all[n++]); });
    return {};
  }

  // Rows [x, 0, 0] with |x| at `place`, which is 1 or 2.
  Status beside(Tensor& tensor, int64_t place) {
    const std::vector<double> all = element_values(tensor);
    const int64_t dim = tensor.dims[tensor.ndim - 1];
    if (Status s = add_like(tensor, 3 * dim, tensor); !s.ok()) return s;
    int64_t n = 0;
    fill(tensor, [&] {
      const int64_t row = n / (3 * dim), third = n % (3 * dim) / dim, d = n % dim;
      ++n;
      const double x = all[static_cast<size_t>(row * dim + d)];
      return third == 0 ? x : third == place ? std::fabs(x) : 0;
    });
    return {};
  }

 private:
  Status add_like(const Tensor& like, int64_t last, Tensor& tensor) {
    const int64_t* n = like.dims;
    if (like.ndim == 2) return layouter_.add(like.dtype, {n[0], last}, tensor);
    if (like.ndim == 3) return layouter_.add(like.dtype, {n[0], n[1], last}, tensor);
    return layouter_.add(like.dtype, {n[0], n[1], n[2], last}, tensor);
  }

  std::vector<Buffer> buffers_;
  Layouter layouter_ = Layouter(Layout::kBshd, 0, buffers_);
};

// sum_k P_k |V_k|: the definition's out with every value positive.
Status compute_magnitude(const Problem& problem, Truth& truth) {
  AttentionDesc desc = truth.inputs.desc;
  desc.return_weights = ReturnWeights::kNone;
  desc.return_column_sums = false;
  const auto outputs = new_outputs(desc, false, Layout::kBshd, problem.seed, Precision::kFloat64);
  if (!outputs.ok()) return outputs.status();
  ForwardArgs args = truth.inputs.args;
  StandIns stand_ins;
  if (Status s = stand_ins.absolute(args.value); !s.ok()) return s;
  run_reference<double>(desc, args, *outputs);
  truth.magnitude = element_values(outputs->out);
  return {};
}

// With |dO|, |V|, -|O| and |dL| in place of theirs, dX of the definition is the sum of its terms' absolute values.
// Wider heads give the products with |K| and |Q| beside the scores: Q' = [Q, |Q|, 0], K' = [K, 0, |K|], so that
// Q' K' = Q K; dQ' = dX K' ends with dX |K|, and dK' = dX Q' has dX |Q| in its middle.
Status compute_magnitude(const Problem& problem, GradientTruth& truth) {
  AttentionDesc desc = truth.inputs.desc;
  desc.scale = desc.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<int64_t>(desc.head_dim, 1))));
  desc.head_dim *= 3;
  BackwardArgs args = backward_args(problem, truth);
  args.accumulate = false;
  StandIns stand_ins;
  Status s = stand_ins.beside(args.forward.query, 1);
  if (s.ok()) s = stand_ins.beside(args.forward.key, 2);
  if (s.ok()) s = stand_ins.absolute(args.forward.value);
  if (s.ok()) s = stand_ins.absolute(args.forward.out, -1);
  if (s.ok()) s = stand_ins.absolute(args.grad_out);
  if (s.ok()) s = stand_ins.absolute(args.grad_logsumexp);
  if (!s.ok()) return s;
  Problem plain = problem;
  plain.layout = Layout::kBshd;
  plain.accumulate = false;
  const auto sums = new_gradients(plain, desc, truth.needs, Precision::kFloat64);
  if (!sums.ok()) return sums.status();
  run_reference<double>(desc, args, *sums);

  plain.accumulate = problem.accumulate;
  const auto before = new_gradients(plain, truth.inputs.desc, truth.needs, Precision::kFloat64);
  if (!before.ok()) return before.status();
  const auto dim = static_cast<size_t>(truth.inputs.desc.head_dim);
  constexpr double kLeast = 0x1p-100;  // a weight below float32's normal numbers may be taken for 0
  for (size_t n = 0; n < kNumGradients; ++n) {
    const std::vector<double> sum = element_values(sums->of[n]), held = element_values(before->of[n]);
    std::vector<double>& magnitude = truth.magnitude[n];
    magnitude.resize(held.size());
    for (size_t i = 0; i < held.size(); ++i) {
      const size_t wide = n < 2 ? i / dim * 3 * dim + (n == 0 ? 2 : 1) * dim + i % dim : i;
      magnitude[i] = std::fabs(sum[wide]);
      if (magnitude[i] == 0) continue;
      magnitude[i] += kLeast;
      if (problem.accumulate) magnitude[i] += std::fabs(held[i]);
    }
  }
  return {};
}

}  // namespace

Result<Truth> compute_truth(const Problem& problem) {
  auto inputs = random_inputs(problem);
  if (!inputs.ok()) return inputs.status();
  Truth truth;
  truth.inputs = std::move(*inputs);
  const AttentionDesc& desc = truth.inputs.desc;
  auto exact = new_outputs(desc, true, Layout::kBshd, problem.seed, Precision::kFloat64);
  if (!exact.ok()) return exact.status();
  truth.exact = std::move(*exact);
  auto yardstick = new_outputs(desc, true, Layout::kBshd, problem.seed);
  if (!yardstick.ok()) return yardstick.status();
  truth.yardstick = std::move(*yardstick);
  run_reference<double>(desc, truth.inputs.args, truth.exact);
  run_yardstick(desc, truth.inputs.args, truth.yardstick);
  if (Status s = compute_magnitude(problem, truth); !s.ok()) return s;
  return truth;
}

Result<GradientTruth> compute_gradient_truth(const Problem& problem) {
  const auto needs = needed_gradients(problem);
  if (!needs.ok()) return needs.status();
  auto inputs = random_inputs(problem);
  if (!inputs.ok()) return inputs.status();
  GradientTruth truth;
  truth.inputs = std::move(*inputs);
  truth.needs = *needs;
  AttentionDesc& desc = truth.inputs.desc;
  desc.return_weights = ReturnWeights::kNone;  // have no gradient
  desc.return_column_sums = false;
  auto incoming = random_incoming(problem, desc);
  if (!incoming.ok()) return incoming.status();
  truth.incoming = std::move(*incoming);

  const auto forward = new_outputs(desc, true, Layout::kBshd, problem.seed, Precision::kFloat64);
  if (!forward.ok()) return forward.status();
  run_reference<double>(desc, truth.inputs.args, *forward);
  auto saved = new_outputs(desc, true, problem.layout, problem.seed);
  if (!saved.ok()) return saved.status();
  truth.saved = std::move(*saved);
  copy(forward->out, truth.saved.out);
  copy(forward->logsumexp, truth.saved.logsumexp);

  auto exact = new_gradients(problem, desc, truth.needs, Precision::kFloat64);
  if (!exact.ok()) return exact.status();
  truth.exact = std::move(*exact);
  auto yardstick = new_gradients(problem, desc, truth.needs);
  if (!yardstick.ok()) return yardstick.status();
  truth.yardstick = std::move(*yardstick);
  const BackwardArgs args = backward_args(problem, truth);
  run_reference<double>(desc, args, truth.exact);
  run_yardstick(desc, args, truth.yardstick);
  if (Status s = compute_magnitude(problem, truth); !s.ok()) return s;
  return truth;
}

BackwardArgs backward_args(const Problem& problem, const GradientTruth& truth) {
  ForwardArgs forward = truth.inputs.args;
  truth.saved.give_to(forward);
  return backward_args(forward, truth.incoming, problem.accumulate);
}

}  // namespace polyhead::tools
