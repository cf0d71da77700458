#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "array.h"
#include "attention/reference.h"
#include "elements.h"
#include "verify.h"

namespace polyhead::tools {
namespace {

// The distance from |x| to the next number of `dtype`.
double ulp(double x, DType dtype) {
  int digits = 24, min_exponent = -125;
  if (dtype == DType::kBFloat16) digits = 8;
  if (dtype == DType::kFloat16) digits = 11, min_exponent = -13;
  if (dtype == DType::kFloat64) digits = 53, min_exponent = -1021;
  int exponent = 0;
  std::frexp(x, &exponent);
  return std::ldexp(1.0, std::max(exponent, min_exponent) - digits);
}

std::vector<double> values(const Tensor& tensor) {
  std::vector<double> all;
  all.reserve(static_cast<size_t>(tensor.num_elements()));
  for_each_element(tensor, [&](const void* element) { all.push_back(element_value(tensor.dtype, element)); });
  return all;
}

std::string value_text(double value) { return std::isnan(value) ? "nan" : fmt::format("{:.9g}", value); }

std::string position(const Tensor& tensor, size_t element) {
  std::vector<int64_t> index(static_cast<size_t>(tensor.ndim));
  auto rest = static_cast<int64_t>(element);
  for (int d = tensor.ndim - 1; d >= 0; --d) {
    index[static_cast<size_t>(d)] = rest % tensor.dims[d];
    rest /= tensor.dims[d];
  }
  return dims_text(index);
}

// `magnitude(n)`: what element n is a sum of; its ulps are allowed.
Verdict compare(const char* name, const Tensor& got_tensor, const Tensor& exact_tensor, const Tensor& yardstick_tensor,
                const std::function<double(size_t, double)>& magnitude) {
  const std::vector<double> got = values(got_tensor), exact = values(exact_tensor), naive = values(yardstick_tensor);
  double naive_error = 0;
  for (size_t n = 0; n < exact.size(); ++n) {
    const double error = std::fabs(naive[n] - exact[n]);
    if (std::isfinite(error)) naive_error = std::max(naive_error, error);
  }
  Verdict verdict;
  verdict.output = name;
  double worst_ratio = -1;
  for (size_t n = 0; n < exact.size(); ++n) {
    // Where float64 stays finite but float32 overflows, the kernel may too.
    if (std::isfinite(exact[n]) && !std::isfinite(naive[n]) && !std::isfinite(got[n])) continue;
    const bool special = !std::isfinite(exact[n]);
    const bool same = std::isnan(exact[n]) ? std::isnan(got[n]) : got[n] == exact[n];
    const double allowed = special ? 0 : 2 * naive_error + 4 * ulp(magnitude(n, exact[n]), got_tensor.dtype);
    const double error = same ? 0 : special ? INFINITY : std::fabs(got[n] - exact[n]);
    const bool passed = same || error <= allowed;  // NaN fails
    if (!passed && verdict.passed) {
      verdict.fault = fmt::format("{}{} is {}, expected {} +- {:.3g}", name, position(got_tensor, n),
                                  value_text(got[n]), value_text(exact[n]), allowed);
    }
    verdict.passed = verdict.passed && passed;
    if (!std::isnan(verdict.largest_error) && !(error <= verdict.largest_error)) verdict.largest_error = error;
    const double ratio = special ? (same ? -1 : INFINITY) : std::isnan(error) ? INFINITY : error / allowed;
    if (ratio > worst_ratio) {
      worst_ratio = ratio;
      verdict.allowed = allowed;
    }
  }
  return verdict;
}

// Rows that see no key are +0, bit for bit.
void check_hidden_rows(const AttentionDesc& desc, const Outputs& got, const Tensor& exact_logsumexp, Verdict& verdict) {
  const std::vector<double> logsumexp = values(exact_logsumexp), out = values(got.out);
  const auto dim = static_cast<size_t>(desc.head_dim_v), heads = static_cast<size_t>(desc.num_heads);
  const auto rows = static_cast<size_t>(desc.seqlen_q);
  for (size_t n = 0; n < out.size(); ++n) {
    const size_t h = n / dim % heads, row = n / dim / heads;  // over batch and queries
    const size_t at = (row / rows * heads + h) * rows + row % rows;
    if (logsumexp[at] != -INFINITY || (out[n] == 0 && !std::signbit(out[n]))) continue;
    if (verdict.passed) {
      verdict.fault =
          fmt::format("out{} is {} in a row that sees no key, expected +0", position(got.out, n), value_text(out[n]));
    }
    verdict.passed = false;
    return;
  }
}

template <class T>
void run_reference(const AttentionDesc& desc, ForwardArgs args, const Outputs& outputs) {
  outputs.give_to(args);
  reference::forward<T>(desc, args);
}

// sum_k P_k |V_k|: the definition's out with every value positive.
Status compute_magnitude(const Problem& problem, Truth& truth) {
  AttentionDesc desc = truth.inputs.desc;
  desc.return_weights = ReturnWeights::kNone;
  desc.return_column_sums = false;
  auto outputs = new_outputs(desc, false, Layout::kBshd, problem.seed, Precision::kFloat64);
  if (!outputs.ok()) return outputs.status();
  truth.magnitude = std::move(*outputs);
  const std::vector<double> value = values(truth.inputs.args.value);
  ForwardArgs args = truth.inputs.args;
  const size_t size_bytes = value.size() * dtype_size_bytes(desc.dtype);
  const Buffer buffer = new_buffer(size_bytes);
  if (buffer == nullptr) return {StatusCode::kOutOfMemory, "not enough memory to verify; choose smaller sizes"};
  const Tensor& v = args.value;
  args.value = v.ndim == 3 ? Tensor(buffer.get(), v.dtype, {v.dims[0], v.dims[1], v.dims[2]})
                           : Tensor(buffer.get(), v.dtype, {v.dims[0], v.dims[1], v.dims[2], v.dims[3]});
  size_t n = 0;
  for_each_element(args.value, [&](void* element) { set_element(desc.dtype, element, std::fabs(value[n++])); });
  run_reference<double>(desc, args, truth.magnitude);
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
  if (desc.dtype == DType::kFloat64) {
    run_reference<double>(desc, truth.inputs.args, truth.yardstick);
  } else {
    run_reference<float>(desc, truth.inputs.args, truth.yardstick);
  }
  if (Status s = compute_magnitude(problem, truth); !s.ok()) return s;
  return truth;
}

std::vector<Verdict> judge(const Truth& truth, const Outputs& got) {
  const AttentionDesc& desc = truth.inputs.desc;
  const Outputs &exact = truth.exact, &naive = truth.yardstick;
  const std::vector<double> sums = values(truth.magnitude.out);
  std::vector<Verdict> verdicts;
  verdicts.push_back(compare("out", got.out, exact.out, naive.out, [&](size_t n, double) { return sums[n]; }));
  check_hidden_rows(desc, got, exact.logsumexp, verdicts.back());
  // |L| <= largest |S| + log(keys)
  const double log_keys = std::log(static_cast<double>(desc.seqlen_k) + 1);
  verdicts.push_back(compare("logsumexp", got.logsumexp, exact.logsumexp, naive.logsumexp,
                             [&](size_t, double L) { return std::fabs(L) + log_keys; }));
  const auto itself = [](size_t, double value) { return value; };
  if (got.weights.given()) verdicts.push_back(compare("weights", got.weights, exact.weights, naive.weights, itself));
  if (got.column_sums.given()) {
    verdicts.push_back(compare("column_sums", got.column_sums, exact.column_sums, naive.column_sums, itself));
  }
  return verdicts;
}

}  // namespace polyhead::tools
