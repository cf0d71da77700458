#include "gradient_problem.h"

#include <cmath>

#include "harness.h"

namespace polyhead::testing {
namespace {

Array normal(DType dtype, const std::vector<int64_t>& dims, Random& random) {
  Array a(dtype, dims);
  for (int64_t n = 0; n < a.size(); ++n) a.set(n, random.normal());
  return a;
}

// Sets every element along the dims of `repeated` to the first along them.
void repeat(Array& a, unsigned repeated) {
  if (repeated == 0) return;
  for (int64_t n = 0; n < a.size(); ++n) {
    int64_t first = 0, inner = 1, rest = n;
    for (size_t d = a.dims.size(); d-- > 0;) {
      if (!(repeated >> d & 1)) first += rest % a.dims[d] * inner;
      inner *= a.dims[d];
      rest /= a.dims[d];
    }
    a.set(n, a.at(first));
  }
}

// The sum over Dv of grad_out * out for each row, in the order of logsumexp.
Array rowsum(const AttentionDesc& d, const BackwardInputs& in) {
  Array sums(in.logsumexp.dtype, in.logsumexp.dims);
  const int64_t heads = d.num_heads, queries = d.seqlen_q, batch = d.packed ? 1 : d.batch;
  for (int64_t row = 0; row < batch * queries * heads; ++row) {
    double sum = 0;
    for (int64_t n = row * d.head_dim_v; n < (row + 1) * d.head_dim_v; ++n) sum += in.grad_out.at(n) * in.out.at(n);
    const int64_t b = row / heads / queries, i = row / heads % queries, h = row % heads;
    sums.set((b * heads + h) * queries + i, sum);
  }
  return sums;
}

// Columns [first, last) of a [rows, columns] array.
Array columns(const Array& a, int64_t first, int64_t last) {
  Array part(a.dtype, {a.dims[0], last - first});
  for (int64_t n = 0; n < part.size(); ++n) {
    part.set(n, a.at(n / (last - first) * a.dims[1] + first + n % (last - first)));
  }
  return part;
}

}  // namespace

GradientProblem gradient_problem(const Problem& forward) {
  Random random(forward.seed * 0x9E3779B97F4A7C15 + 77);
  GradientProblem p;
  p.forward = forward;
  if (random.chance(0.7)) {
    const GradientSet here =
        7u | (forward.desc.attn_bias.given ? 8u : 0u) | (forward.desc.alibi_slopes_ndim ? 16u : 0u);
    do {
      p.asked = static_cast<GradientSet>(random.integer(1, kAllGradients)) & here;
    } while (p.asked == 0);
  }
  p.accumulate = random.chance(0.4);
  p.grad_logsumexp = random.chance(0.4);
  if (random.chance(0.15)) p.repeated_grad_out = random.chance(0.5) ? 15 : static_cast<unsigned>(random.integer(1, 14));
  return p;
}

void compute_forward(const AttentionDesc& desc, BackwardInputs& in) {
  const bool delta = in.delta.given();
  AttentionDesc plain = desc;
  plain.return_weights = ReturnWeights::kNone;
  plain.return_column_sums = false;
  Outputs o = reference_outputs<double>(plain, in.forward, false);
  in.out = std::move(o.out);
  in.logsumexp = std::move(o.logsumexp);
  if (delta) {
    in.delta = rowsum(desc, in);
    in.out = Array();
  }
}

BackwardInputs random_inputs(const GradientProblem& problem) {
  const AttentionDesc& d = problem.forward.desc;
  Random random(problem.forward.seed * 0xD1342543DE82EF95 + 3);
  BackwardInputs in;
  in.forward = random_inputs(problem.forward);
  std::vector<int64_t> out_dims = in.forward.query.dims;
  out_dims.back() = d.head_dim_v;
  in.grad_out = normal(d.dtype, out_dims, random);
  repeat(in.grad_out, problem.repeated_grad_out);
  if (problem.delta) in.delta = Array(DType::kFloat32, {1});  // asks for one
  compute_forward(d, in);
  if (problem.grad_logsumexp) in.grad_logsumexp = normal(in.logsumexp.dtype, in.logsumexp.dims, random);
  in.repeated_grad_out = problem.repeated_grad_out != 0;
  in.accumulate = problem.accumulate;
  for (const GradientName& name : kGradients) {
    const Array& input = in.forward.*name.input;
    if (in.accumulate && input.given()) in.before.*name.gradient = normal(input.dtype, input.dims, random);
  }
  return in;
}

BackwardSlice slice_batch(const AttentionDesc& desc, const BackwardInputs& in, int64_t first, int64_t last) {
  const Slice forward = slice_batch(desc, in.forward, first, last);
  BackwardSlice s{forward.desc, in};
  s.inputs.forward = forward.inputs;
  const Span begin = span_of(desc, in.forward, first);
  auto cut_rows = [&](Array& a, int64_t first_row, int64_t count) {
    if (a.given()) a = rows(a, first_row, first_row + count);
  };
  const int64_t batch = last - first, first_q = desc.packed ? begin.first_q : first;
  const int64_t first_k = desc.packed ? begin.first_k : first;
  const int64_t count_q = desc.packed ? s.desc.seqlen_q : batch, count_k = desc.packed ? s.desc.seqlen_k : batch;
  Gradients& before = s.inputs.before;
  for (Array* a : {&s.inputs.out, &s.inputs.grad_out, &before.query}) cut_rows(*a, first_q, count_q);
  for (Array* a : {&before.key, &before.value}) cut_rows(*a, first_k, count_k);
  if (before.attn_bias.given() && before.attn_bias.dims[0] > 1) cut_rows(before.attn_bias, first, batch);
  if (desc.alibi_slopes_ndim == 2) cut_rows(before.alibi_slopes, first, batch);
  for (Array* a : {&s.inputs.logsumexp, &s.inputs.grad_logsumexp, &s.inputs.delta}) {
    if (a->given()) *a = desc.packed ? columns(*a, first_q, first_q + count_q) : rows(*a, first, last);
  }
  return s;
}

std::string problem_line(const std::string& kernel, const GradientProblem& problem) {
  std::string line = problem_line(kernel, problem.forward);
  line.insert(line.find("  #"), " --gradients");
  line += ", gradients of";
  for (int n = 0; n < kNumGradients; ++n) {
    if (problem.asked >> n & 1) line += std::string(" ") + kGradients[n].name;
  }
  if (problem.accumulate) line += ", accumulated";
  if (problem.grad_logsumexp) line += ", grad_logsumexp";
  if (problem.delta) line += ", delta";
  if (problem.repeated_grad_out) line += ", repeated grad_out " + std::to_string(problem.repeated_grad_out);
  return line;
}

}  // namespace polyhead::testing
