#include "gradient_harness.h"

#include <algorithm>
#include <cmath>

#include "gradient_definition.h"
#include "judge.h"
#include "tools/bounds.h"

namespace polyhead::testing {
namespace {

// The rows of each input that some visible pair reads.
struct UsedRows {
  std::vector<uint8_t> of[kNumGradients];

  UsedRows(const AttentionDesc& d, const Inputs& in) {
    VisibleParts seen(d, in, Visibility(d, in));
    of[0] = std::move(seen.query);
    of[1] = of[2] = std::move(seen.key);
    of[3] = std::move(seen.bias);
    if (d.alibi_slopes_ndim == 1) {
      of[4].resize(static_cast<size_t>(d.num_heads));
      for (size_t n = 0; n < seen.heads.size(); ++n) of[4][n % of[4].size()] |= seen.heads[n];
    }
    if (d.alibi_slopes_ndim == 2) of[4] = std::move(seen.heads);
  }
};

// All gradients that a problem asks for, over any number of draws.
class GradientJudge {
 public:
  explicit GradientJudge(const GradientProblem& problem) : problem_(problem) {
    const Fill fill = problem.forward.fill;
    const bool shifted = fill == Fill::kShiftUp || fill == Fill::kShiftDown || fill == Fill::kUnderflow;
    const AttentionDesc& d = problem.forward.desc;
    const bool capped = d.softcap > 0 && fill != Fill::kNormal && fill != Fill::kOutliers;  // all at softcap
    const auto bounds = tools::gradient_bounds(d, shifted, capped || tools::has_equal_weights(d));
    for (size_t n = 0; n < kNumGradients; ++n) errors_[n] = Errors(kGradients[n].name, bounds[n]);
  }

  void add(const Gradients& got, const ExpectedGradients& want, const BackwardInputs& in) {
    faults_.insert(faults_.end(), got.faults.begin(), got.faults.end());
    const AttentionDesc& d = problem_.forward.desc;
    const UsedRows used(d, in.forward);
    for (int n = 0; n < kNumGradients; ++n) {
      const auto gradient = kGradients[n].gradient;
      const Array &g = got.*gradient, &magnitude = want.magnitude.*gradient;
      if (!(problem_.asked >> n & 1) || !magnitude.given()) continue;
      errors_[n].add(g, want.exact.*gradient, want.naive.*gradient, [&](int64_t at) { return magnitude.at(at); });
      check_unused(kGradients[n].name, g, in.before.*gradient, used.of[n]);
    }
  }

  std::string verdict() const {
    std::string text;
    for (const std::string& fault : faults_) text += fault + "\n";
    for (const Errors& errors : errors_) text += errors.verdict();
    return text;
  }

  bool could_be_chance() const {
    return faults_.empty() &&
           std::all_of(errors_, errors_ + kNumGradients, [](const Errors& e) { return e.could_be_chance(); });
  }

 private:
  // Where no visible pair contributes, the gradient is +0 or what was there, bit for bit.
  void check_unused(const char* name, const Array& got, const Array& before, const std::vector<uint8_t>& used) {
    if (used.empty()) return;
    const size_t row = got.bytes.size() / used.size();
    const std::vector<uint8_t> zeros(row);
    for (size_t n = 0; n < used.size(); ++n) {
      const uint8_t* want = before.given() ? before.bytes.data() + n * row : zeros.data();
      if (used[n] || std::equal(want, want + row, got.bytes.data() + n * row)) continue;
      faults_.push_back(std::string(name) + ": row " + std::to_string(n) + " takes part in no visible pair, expected " +
                        (before.given() ? "what was there before" : "+0"));
      return;
    }
  }

  const GradientProblem& problem_;
  Errors errors_[kNumGradients];
  std::vector<std::string> faults_;
};

}  // namespace

Gradients run(const Kernel& kernel, const AttentionDesc& desc, const BackwardInputs& in, const RunOptions& options,
              GradientSet asked) {
  PlacedInputs inputs(options);
  BackwardArgs args;
  args.forward = inputs.add(in.forward);
  args.forward.out = inputs.add("out", in.out);
  args.forward.logsumexp = inputs.add("logsumexp", in.logsumexp);
  const Layout layout = inputs.next_layout();
  const bool expanded = in.repeated_grad_out && options.layout == Layout::kMixed;
  args.grad_out = inputs.add("grad_out", in.grad_out, expanded ? Layout::kExpanded : layout);
  args.grad_logsumexp = inputs.add("grad_logsumexp", in.grad_logsumexp);
  args.delta = inputs.add("delta", in.delta);
  args.accumulate = in.accumulate;

  std::vector<Placed> outputs;
  for (int n = 0; n < kNumGradients; ++n) {
    const Array &input = in.forward.*kGradients[n].input, &before = in.before.*kGradients[n].gradient;
    const std::vector<int64_t> dims = asked >> n & 1 ? input.dims : std::vector<int64_t>();
    const Layout output_layout = inputs.next_layout();
    outputs.push_back(in.accumulate && !dims.empty()
                          ? Placed::accumulator(before, output_layout, options.guard, Written::kGradient)
                          : Placed::output(input.dtype, dims, output_layout, options.guard, Written::kGradient));
    args.*kGradients[n].tensor = outputs.back().tensor();
  }

  Executor& threads = executor(options.threads);
  const size_t workspace_bytes = kernel.backward_workspace_bytes(desc, threads.num_threads()).value();
  const GuardedBytes workspace(workspace_bytes, options.guard, 0xff);
  args.forward.workspace = workspace.data();
  args.forward.workspace_bytes = workspace_bytes;
  Gradients g;
  if (options.through_plan) {
    const Result<Plan> plan = polyhead::plan(desc, {kernel.name, {.executor = &threads}});
    const Status status = plan.ok() ? plan->backward(args) : plan.status();
    if (!status.ok()) g.faults.push_back("plan: " + status.message());
  } else {
    const Status status = kernel.backward(desc, args, threads);
    if (!status.ok()) g.faults.push_back("backward: " + status.message());
  }
  for (int n = 0; n < kNumGradients; ++n) {
    g.*kGradients[n].gradient = outputs[static_cast<size_t>(n)].result(kGradients[n].name, &g.faults);
  }
  inputs.check_unchanged(&g.faults);
  if (workspace_bytes % 64 != 0) g.faults.push_back("backward_workspace_bytes is no multiple of 64");
  return g;
}

BackwardArgs dense_args(const BackwardInputs& in) {
  BackwardArgs args;
  args.forward = dense_args(in.forward);
  args.forward.out = view(in.out);
  args.forward.logsumexp = view(in.logsumexp);
  args.grad_out = view(in.grad_out);
  args.grad_logsumexp = view(in.grad_logsumexp);
  args.delta = view(in.delta);
  args.accumulate = in.accumulate;
  return args;
}

std::string difference(const Gradients& a, const Gradients& b, GradientSet asked) {
  std::string text;
  for (int n = 0; n < kNumGradients && text.empty(); ++n) {
    const auto gradient = kGradients[n].gradient;
    if (asked >> n & 1) text = difference(kGradients[n].name, a.*gradient, b.*gradient);
  }
  return text;
}

ExpectedGradients expected(const AttentionDesc& desc, const BackwardInputs& in) {
  const Visibility seen(desc, in.forward);
  ExpectedGradients e;
  e.exact = defined_gradients<double>(desc, in, seen, true);
  e.naive = desc.dtype == DType::kFloat64 ? defined_gradients<double>(desc, in, seen, false)
                                          : defined_gradients<float>(desc, in, seen, false);
  e.magnitude = gradient_magnitudes(desc, in, seen);
  return e;
}

std::string verdict(const GradientProblem& problem, const Gradients& got, const ExpectedGradients& want,
                    const BackwardInputs& in) {
  GradientJudge judge(problem);
  judge.add(got, want, in);
  return judge.verdict();
}

std::string mismatch(const Kernel& kernel, const GradientProblem& problem, const BackwardInputs& in,
                     const ExpectedGradients& want, const RunOptions& options) {
  const AttentionDesc& d = problem.forward.desc;
  GradientJudge judge(problem);
  judge.add(run(kernel, d, in, options, problem.asked), want, in);
  GradientProblem again = problem;
  for (int64_t n = 0; n < num_redraws(d) && !judge.verdict().empty() && judge.could_be_chance(); ++n) {
    again.forward.seed = tools::redraw_seed(problem.forward.seed, n);
    const BackwardInputs more = random_inputs(again);
    judge.add(run(kernel, d, more, options, problem.asked), expected(d, more), more);
  }
  return judge.verdict();
}

}  // namespace polyhead::testing
