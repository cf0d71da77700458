#include "testing/judge.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "testing/bounds.h"

namespace polyhead::testing {
namespace {

template <class... A>
std::string format(const char* text, A... a) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, text, a...);
  return buffer;
}

// Rows of `out` whose logsumexp is -inf must be +0, bit for bit.
void judge_hidden_rows(const AttentionDesc& desc, const Outputs& got, const Array& exact_logsumexp,
                       std::vector<std::string>* faults) {
  const size_t row_bytes = static_cast<size_t>(desc.head_dim_v) * dtype_size_bytes(got.out.dtype);
  const int64_t batch = desc.packed ? 1 : desc.batch;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < desc.seqlen_q; ++i) {
      for (int64_t h = 0; h < desc.num_heads; ++h) {
        if (exact_logsumexp.at((b * desc.num_heads + h) * desc.seqlen_q + i) != -HUGE_VAL) continue;
        const auto* row =
            got.out.bytes.data() + static_cast<size_t>((b * desc.seqlen_q + i) * desc.num_heads + h) * row_bytes;
        if (std::any_of(row, row + row_bytes, [](uint8_t byte) { return byte != 0; })) {
          return faults->push_back(format("out: the row of batch %lld, query %lld, head %lld sees no key and is not 0",
                                          static_cast<long long>(b), static_cast<long long>(i),
                                          static_cast<long long>(h)));
        }
      }
    }
  }
}

// The rows of each input that some visible pair reads: its part of `seen`, in the order of kGradients.
struct UsedRows {
  std::vector<uint8_t> slopes, sinks;  // every query reads a sink
  std::array<const std::vector<uint8_t>*, kNumGradients> of;

  UsedRows(const AttentionDesc& d, const VisibleParts& seen)
      : of{&seen.query, &seen.key, &seen.key, &seen.bias, &slopes, &sinks} {
    if (d.alibi_slopes_ndim == 1) {
      slopes.resize(static_cast<size_t>(d.num_heads));
      for (size_t n = 0; n < seen.heads.size(); ++n) slopes[n % slopes.size()] |= seen.heads[n];
    }
    if (d.alibi_slopes_ndim == 2) slopes = seen.heads;
  }
};

// Where no visible pair contributes, the gradient is +0 or what was there, bit for bit.
void check_unused(const char* name, const Array& got, const Array& before, const std::vector<uint8_t>& used,
                  std::vector<std::string>* faults) {
  if (used.empty()) return;
  const size_t row = got.bytes.size() / used.size();
  const std::vector<uint8_t> zeros(row);
  for (size_t n = 0; n < used.size(); ++n) {
    const uint8_t* want = before.given() ? before.bytes.data() + n * row : zeros.data();
    if (used[n] || std::equal(want, want + row, got.bytes.data() + n * row)) continue;
    faults->push_back(std::string(name) + ": row " + std::to_string(n) + " takes part in no visible pair, expected " +
                      (before.given() ? "what was there before" : "+0"));
    return;
  }
}

// A weight below float32's normal numbers may be taken for 0: 4 ulp of 2^-104 are 2^-126, the least of these. What is 0 and
// has no variance is hidden; without a softmax, the terms of others may be as large as each other.
std::vector<double> weight_magnitudes(const Array& weights, const Array& variance) {
  std::vector<double> magnitude = numbers<double>(weights);
  for (size_t n = 0; n < magnitude.size(); ++n) {
    const bool hidden = magnitude[n] == 0 && doubles(variance)[n] == 0;
    magnitude[n] = hidden ? 0 : std::max(std::fabs(magnitude[n]), 0x1p-104);
  }
  return magnitude;
}

}  // namespace

void add_errors(Errors& errors, const Array& got, const Array& exact, const Array& naive,
                std::span<const double> magnitude, const Array* variance, const Array* pairs, const Array* cut) {
  if (!got.given() && !exact.given()) return;
  if (got.dims != exact.dims) return errors.add_fault(errors.name() + ": wrong dims");
  const auto given = [](const Array* a) { return a ? doubles(*a) : std::span<const double>(); };
  errors.add({got.dtype, got.dims, numbers<double>(got), doubles(exact), numbers<double>(naive), magnitude,
              given(variance), given(pairs), given(cut)});
}

Judge::Judge(const Problem& problem, bool pairs, bool cut) : problem_(problem), pairs_(pairs), cut_(cut) {
  const AttentionDesc desc = problem_desc(problem);
  const bool capped = desc.softcap > 0 && problem.fill != Fill::kNormal && problem.fill != Fill::kOutliers;
  const bool shifted = problem.fill == Fill::kShiftUp || problem.fill == Fill::kShiftDown;
  const bool same = capped || desc.head_dim == 0 || desc.scale.value_or(1) == 0;
  const bool alike = desc.head_dim == 1 && (shifted || problem.fill == Fill::kUnderflow);  // set to one number each
  const ForwardBounds bounds = forward_bounds(desc, same, shifted, alike, pairs);
  out_ = Errors("out", bounds.out);
  logsumexp_ = Errors("logsumexp", bounds.logsumexp);
  weights_ = Errors("attn_weights", bounds.attn_weights);
  column_sums_ = Errors("column_sums", bounds.column_sums);
  const auto of = gradient_bounds(desc, same, problem.repeated_grad_out != 0, pairs);
  for (size_t n = 0; n < kNumGradients; ++n) gradients_[n] = Errors(kGradients[n].name, of[n]);
  for (size_t n = 0; n < desc.captures.size(); ++n) {
    captures_.emplace_back("grad_captures " + desc.program->captures()[n].name, kCapturedBound);
  }
}

void Judge::add(const AttentionDesc& desc, const Outputs& got, const Expected& want) {
  const Outputs &exact = want.exact, &naive = want.naive;
  const ForwardVariance& variance = want.variance;
  faults_.insert(faults_.end(), got.faults.begin(), got.faults.end());
  add_errors(out_, got.out, exact.out, naive.out, doubles(want.magnitude), &variance.out,
             pairs_ ? &variance.pairs_out : nullptr, cut_ ? &variance.cut_out : nullptr);
  if (got.logsumexp.given()) {
    // |L| <= largest |S| + log(keys)
    const double log_keys = std::log(static_cast<double>(desc.seqlen_k) + 1);
    std::vector<double> magnitude = numbers<double>(exact.logsumexp);
    for (double& L : magnitude) L = std::fabs(L) + log_keys;
    add_errors(logsumexp_, got.logsumexp, exact.logsumexp, naive.logsumexp, magnitude, &variance.logsumexp, nullptr,
               cut_ ? &variance.cut_logsumexp : nullptr);
  }
  add_errors(weights_, got.attn_weights, exact.attn_weights, naive.attn_weights,
             weight_magnitudes(exact.attn_weights, variance.attn_weights), &variance.attn_weights);
  add_errors(column_sums_, got.column_sums, exact.column_sums, naive.column_sums,
             weight_magnitudes(exact.column_sums, variance.column_sums), &variance.column_sums);
  judge_hidden_rows(desc, got, exact.logsumexp, &faults_);
}

void Judge::add(const AttentionDesc& desc, const Gradients& got, const ExpectedGradients& want,
                const BackwardInputs& in) {
  faults_.insert(faults_.end(), got.faults.begin(), got.faults.end());
  const UsedRows used(desc, want.seen);
  const bool cut = cut_ && out_dtype(desc) == desc.dtype;  // beside a float32 grad_out all is float32
  for (size_t n = 0; n < kNumGradients; ++n) {
    const auto gradient = kGradients[n].gradient;
    const Array &g = got.*gradient, &magnitude = want.magnitude.*gradient;
    if (!(problem_.needs >> n & 1) || !magnitude.given()) continue;
    add_errors(gradients_[n], g, want.exact.*gradient, want.naive.*gradient, doubles(magnitude),
               &(want.variance.arithmetic.*gradient), pairs_ ? &(want.variance.pairs.*gradient) : nullptr,
               cut ? &(want.variance.cut.*gradient) : nullptr);
    check_unused(kGradients[n].name, g, in.before.*gradient, *used.of[n], &faults_);
  }
  for (size_t n = 0; n < captures_.size() && (problem_.needs & kCapturedGradients) != 0; ++n) {
    add_errors(captures_[n], got.captures[n], want.exact.captures[n], want.naive.captures[n],
               doubles(want.magnitude.captures[n]),
               want.variance.arithmetic.captures[n].given() ? &want.variance.arithmetic.captures[n] : nullptr);
  }
}

std::vector<Verdict> Judge::verdicts() const {
  std::vector<Verdict> verdicts;
  for (const std::string& fault : faults_)
    verdicts.push_back({fault.substr(0, fault.find(':')), NAN, 0, NAN, 0, false, fault});
  const auto add = [&](const Errors& errors) {
    if (errors.judged()) verdicts.push_back(verdict_of(errors));
  };
  for (const Errors* errors : {&out_, &logsumexp_, &weights_, &column_sums_}) add(*errors);
  for (const Errors& errors : gradients_) add(errors);
  for (const Errors& errors : captures_) add(errors);
  return verdicts;
}

std::string Judge::verdict() const {
  std::string text;
  for (const std::string& fault : faults_) text += fault + "\n";
  for (const Errors* errors : {&out_, &logsumexp_, &weights_, &column_sums_}) text += text_of(*errors);
  for (const Errors& errors : gradients_) text += text_of(errors);
  for (const Errors& errors : captures_) text += text_of(errors);
  return text;
}

int64_t num_draws(int64_t rows, int64_t enough) {
  constexpr int64_t kMostDraws = 8;
  return rows == 0 ? 1 : std::clamp<int64_t>((enough + rows - 1) / rows, 1, kMostDraws);
}

int64_t num_draws(const AttentionDesc& d) { return num_draws((d.packed ? 1 : d.batch) * d.num_heads * d.seqlen_q); }

uint64_t seed_of_draw(uint64_t seed, int64_t n) { return seed + 1000003 * static_cast<uint64_t>(n); }

// Of each draw's problem, draw(problem).
template <class Draw>
static auto draws_of(const Problem& problem, Draw draw) {
  std::vector<decltype(draw(problem))> draws;
  Problem drawn = problem;
  const int64_t count = num_draws(problem_desc(problem));
  for (int64_t n = 0; n < count; ++n) {
    drawn.seed = seed_of_draw(problem.seed, n);
    draws.push_back(draw(drawn));
  }
  return draws;
}

std::vector<ForwardDraw> forward_draws(const Problem& problem) {
  return draws_of(problem, [](const Problem& drawn) {
    ForwardDraw draw{problem_desc(drawn), random_inputs(drawn), {}};
    draw.want = expected(draw.desc, draw.in);
    return draw;
  });
}

std::vector<BackwardDraw> backward_draws(const Problem& problem) {
  return draws_of(problem, [](const Problem& drawn) {
    BackwardDraw draw{problem_desc(drawn), random_backward_inputs(drawn), {}};
    draw.want = expected(draw.desc, draw.in);
    return draw;
  });
}

Judge judged(const Kernel& kernel, const Problem& problem, const std::vector<ForwardDraw>& draws,
             const RunOptions& options) {
  Judge judge(problem, multiplies_pairs(kernel.name, problem.desc), sums_on_tensor_cores(kernel.name, problem.desc));
  for (const ForwardDraw& draw : draws) judge.add(draw.desc, run(kernel, draw.desc, draw.in, options), draw.want);
  return judge;
}

Judge judged(const Kernel& kernel, const Problem& problem, const std::vector<BackwardDraw>& draws,
             const RunOptions& options) {
  Judge judge(problem, multiplies_pairs(kernel.name, problem.desc), sums_on_tensor_cores(kernel.name, problem.desc));
  for (const BackwardDraw& draw : draws) {
    judge.add(draw.desc, run(kernel, draw.desc, draw.in, options, problem.needs), draw.want, draw.in);
  }
  return judge;
}

}  // namespace polyhead::testing
