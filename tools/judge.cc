#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "bounds.h"
#include "elements.h"
#include "verify.h"

namespace polyhead::tools {
namespace {

void compare(Errors& errors, const Tensor& got, const Tensor& exact, const Tensor& yardstick,
             const std::vector<double>& magnitude) {
  const std::vector<double> g = element_values(got), e = element_values(exact), y = element_values(yardstick);
  errors.add({got.dtype, {got.dims, static_cast<size_t>(got.ndim)}, g, e, y, magnitude});
}

// The other outputs: magnitudes that follow from the exact values.
void compare(Errors& errors, const Tensor& got, const Tensor& exact, const Tensor& yardstick,
             const std::function<double(double)>& magnitude) {
  if (!got.given()) return;
  std::vector<double> magnitudes = element_values(exact);
  std::transform(magnitudes.begin(), magnitudes.end(), magnitudes.begin(), magnitude);
  compare(errors, got, exact, yardstick, magnitudes);
}

// Rows that see no key are +0, bit for bit.
void check_hidden_rows(const AttentionDesc& desc, const Outputs& got, const Tensor& exact_logsumexp, Errors& errors) {
  const std::vector<double> logsumexp = element_values(exact_logsumexp), out = element_values(got.out);
  const auto dim = static_cast<size_t>(desc.head_dim_v), heads = static_cast<size_t>(desc.num_heads);
  const auto rows = static_cast<size_t>(desc.seqlen_q);
  for (size_t n = 0; n < out.size(); ++n) {
    const size_t h = n / dim % heads, row = n / dim / heads;  // over batch and queries
    const size_t at = (row / rows * heads + h) * rows + row % rows;
    if (logsumexp[at] != -INFINITY || (out[n] == 0 && !std::signbit(out[n]))) continue;
    const std::span<const int64_t> dims(got.out.dims, static_cast<size_t>(got.out.ndim));
    errors.add_fault("out" + position_text(dims, static_cast<int64_t>(n)) + " is " + std::to_string(out[n]) +
                     " in a row that sees no key, expected +0");
    return;
  }
}

}  // namespace

Errors& Judge::errors(const char* name, const Bound& bound) {
  const auto known =
      std::find_if(errors_.begin(), errors_.end(), [&](const Errors& errors) { return errors.name() == name; });
  return known != errors_.end() ? *known : errors_.emplace_back(name, bound);
}

void Judge::add(const Truth& truth, const Outputs& got) {
  const AttentionDesc& desc = truth.inputs.desc;
  const Outputs &exact = truth.exact, &naive = truth.yardstick;
  const ForwardBounds bounds = forward_bounds(desc, false);
  Errors& out = errors("out", bounds.out);
  compare(out, got.out, exact.out, naive.out, truth.magnitude);
  check_hidden_rows(desc, got, exact.logsumexp, out);
  // |L| <= largest |S| + log(keys)
  const double log_keys = std::log(static_cast<double>(desc.seqlen_k) + 1);
  compare(errors("logsumexp", bounds.logsumexp), got.logsumexp, exact.logsumexp, naive.logsumexp,
          [&](double L) { return std::fabs(L) + log_keys; });
  const auto itself = [](double value) { return value; };
  if (got.weights.given()) {
    compare(errors("weights", bounds.weights), got.weights, exact.weights, naive.weights, itself);
  }
  if (got.column_sums.given()) {
    compare(errors("column_sums", bounds.column_sums), got.column_sums, exact.column_sums, naive.column_sums, itself);
  }
}

void Judge::add(const GradientTruth& truth, const Gradients& got) {
  const AttentionDesc& desc = truth.inputs.desc;
  const std::array<Bound, kNumGradients> bounds = gradient_bounds(desc, false, has_equal_weights(desc));
  for (size_t n = 0; n < kNumGradients; ++n) {
    if ((truth.needs >> n & 1) == 0) continue;
    compare(errors(kGradients[n].name, bounds[n]), got.of[n], truth.exact.of[n], truth.yardstick.of[n],
            truth.magnitude[n]);
  }
}

Verdict verdict_of(const Errors& errors) {
  const std::vector<std::string> complaints = errors.complaints();
  return {errors.name(), errors.error(), errors.allowed(), complaints.empty(),
          complaints.empty() ? "" : complaints.front()};
}

std::vector<Verdict> Judge::verdicts() const {
  std::vector<Verdict> verdicts;
  for (const Errors& errors : errors_) verdicts.push_back(verdict_of(errors));
  return verdicts;
}

bool Judge::passed() const {
  return std::all_of(errors_.begin(), errors_.end(), [](const Errors& errors) { return errors.complaints().empty(); });
}

bool Judge::could_be_chance() const {
  return std::all_of(errors_.begin(), errors_.end(), [](const Errors& errors) { return errors.could_be_chance(); });
}

}  // namespace polyhead::tools
