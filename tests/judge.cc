#include "judge.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace polyhead::testing {
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

template <class... A>
std::string format(const char* text, A... a) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, text, a...);
  return buffer;
}

std::string position(const Array& a, int64_t n) {
  std::string text = "]";
  for (size_t d = a.dims.size(); d-- > 0;) {
    text = (d == 0 ? "[" : ", ") + std::to_string(n % a.dims[d]) + text;
    n /= a.dims[d];
  }
  return text;
}

// Rows of `out` whose logsumexp is -inf must be +0, bit for bit.
void judge_hidden_rows(const AttentionDesc& desc, const Outputs& got, const Array& exact_logsumexp,
                       std::vector<std::string>* faults) {
  const size_t row_bytes = static_cast<size_t>(desc.head_dim_v) * dtype_size_bytes(desc.dtype);
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

}  // namespace

void Errors::add(const Array& got, const Array& exact, const Array& naive, const Magnitude& magnitude,
                 std::vector<std::string>* faults) {
  if (!got.given() && !exact.given()) return;
  if (got.dims != exact.dims) return faults->push_back(format("%s: wrong dims", name_));
  int64_t wrong = 0;
  for (int64_t n = 0, size = got.size(); n < size; ++n) {
    const double g = got.at(n), e = exact.at(n), w = naive.at(n);
    if (std::isfinite(e) && !std::isfinite(w) && !std::isfinite(g)) continue;  // float32 overflows, float64 does not
    if (!std::isfinite(e) ? (std::isnan(e) ? !std::isnan(g) : g != e) : !std::isfinite(g)) {
      if (wrong++ == 0) {
        faults->push_back(format("%s %s is %g, expected %g", name_, position(got, n).c_str(), g, e));
      }
      continue;
    }
    if (!std::isfinite(e)) continue;
    const double error = g - e, ulps = 4 * ulp(magnitude(n), got.dtype);
    ulps_ = std::max(ulps_, ulps);
    if (std::fabs(error) - ulps > excess_) {
      excess_ = std::fabs(error) - ulps;
      worst_ =
          format("%s %s is %.9g, expected %.9g: error %.3g", name_, position(got, n).c_str(), g, e, std::fabs(error));
    }
    if (!std::isfinite(w)) continue;
    naive_max_ = std::max(naive_max_, std::fabs(w - e));
    const double outward = e < 0 ? -1 : 1;  // drift is growth or shrinkage
    const DType arithmetic = got.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    const double unit = ulp(differences_ ? magnitude(n) : e, arithmetic);
    count_ += 1;
    sum_ += outward * error;
    naive_sum_ += outward * (w - e);
    square_ += error * error;
    naive_square_ += (w - e) * (w - e);
    ulp_square_ += unit * unit;
  }
}

std::string Errors::verdict() const {
  std::string text;
  if (excess_ > max_factor_ * naive_max_) {
    text += worst_ + format(", more by %.3g than %gx the yardstick's %.3g + 4 ulp\n",
                            excess_ - max_factor_ * naive_max_, max_factor_, naive_max_);
  }
  if (count_ < 4096) return text;
  // The naive sum of one term is exact, which says nothing: the yardstick errs by half an ulp of the arithmetic at least.
  const double unit = std::sqrt(ulp_square_ / count_), rmse = std::sqrt(square_ / count_);
  const double yardstick = std::max(std::sqrt(naive_square_ / count_), unit / 2);
  const double noise = 1 / std::sqrt(count_ / dependent_);
  if (!(rmse <= rmse_factor_ * (1 + 2 * noise) * yardstick)) {
    text += format("%s: RMSE %.4g, %.2fx the yardstick's, allowed %.2fx + %.2f of noise\n", name_, rmse,
                   rmse / yardstick, rmse_factor_, 2 * noise * rmse_factor_);
  }
  const double drift = std::fabs(sum_ / count_);
  const double allowed = std::fabs(naive_sum_ / count_) + 6 * noise * rmse + unit / 4;
  if (!(drift <= allowed)) text += format("%s: mean signed error %.4g, allowed %.4g\n", name_, drift, allowed);
  return text;
}

Judge::Judge(const Problem& problem) : problem_(problem) {
  const AttentionDesc& d = problem.desc;
  const bool shifted = problem.fill == Fill::kShiftUp || problem.fill == Fill::kShiftDown;
  const bool half = d.dtype == DType::kBFloat16 || d.dtype == DType::kFloat16;
  const double factor = shifted ? 1.5 : 1.1;
  const double out_factor = d.dtype == DType::kBFloat16 ? 1.5 : factor;
  // Elements of a row share a softmax, and so its errors, but not the rounding to a half type, which outweighs those; not
  // in bfloat16, where a row's weights are rounded to bfloat16 before they meet V.
  const bool own_errors = d.dtype == DType::kFloat16;
  const double row = static_cast<double>(own_errors ? 1 : std::max<int64_t>(d.head_dim_v, 1));
  const double keys = static_cast<double>(half ? 1 : std::max<int64_t>(d.seqlen_k, 1));
  out_ = Errors("out", 2, out_factor, row);
  logsumexp_ = Errors("logsumexp", 2, factor, 1);
  weights_ = Errors("weights", 2, out_factor, keys);
  column_sums_ = Errors("column_sums", 2, factor, static_cast<double>(std::max<int64_t>(d.seqlen_k, 1)));
}

void Judge::add(const Outputs& got, const Expected& want) {
  const Outputs &exact = want.exact, &naive = want.naive;
  faults_.insert(faults_.end(), got.faults.begin(), got.faults.end());
  out_.add(
      got.out, exact.out, naive.out, [&](int64_t n) { return want.magnitude.at(n); }, &faults_);
  if (got.logsumexp.given()) {
    // |L| <= largest |S| + log(keys)
    const double log_keys = std::log(static_cast<double>(problem_.desc.seqlen_k) + 1);
    const Array& L = exact.logsumexp;
    logsumexp_.add(
        got.logsumexp, L, naive.logsumexp, [&](int64_t n) { return std::fabs(L.at(n)) + log_keys; }, &faults_);
  }
  weights_.add(
      got.weights, exact.weights, naive.weights, [&](int64_t n) { return exact.weights.at(n); }, &faults_);
  column_sums_.add(
      got.column_sums, exact.column_sums, naive.column_sums, [&](int64_t n) { return exact.column_sums.at(n); },
      &faults_);
  judge_hidden_rows(problem_.desc, got, exact.logsumexp, &faults_);
}

std::string Judge::verdict() const {
  std::string text;
  for (const std::string& fault : faults_) text += fault + "\n";
  for (const Errors* errors : {&out_, &logsumexp_, &weights_, &column_sums_}) text += errors->verdict();
  return text;
}

bool Judge::could_be_chance() const {
  for (const Errors* errors : {&out_, &logsumexp_, &weights_, &column_sums_}) {
    if (errors->hopeless()) return false;
  }
  return faults_.empty();
}

int64_t num_redraws(const AttentionDesc& d) {
  const int64_t rows = std::max<int64_t>((d.packed ? 1 : d.batch) * d.num_heads * d.seqlen_q, 1);
  return std::clamp<int64_t>(4096 / rows, 4, 64);
}

uint64_t redraw_seed(uint64_t seed, int64_t n) { return seed + 1000003 * static_cast<uint64_t>(n + 1); }

std::string mismatch(const Outputs& got, const Expected& want, const Problem& problem) {
  Judge judge(problem);
  judge.add(got, want);
  return judge.verdict();
}

std::string mismatch(const Kernel& kernel, const Problem& problem, const Inputs& in, const Expected& want,
                     const RunOptions& options) {
  Judge judge(problem);
  judge.add(run(kernel, problem.desc, in, options), want);
  const AttentionDesc& d = problem.desc;
  Problem again = problem;
  for (int64_t n = 0; n < num_redraws(d) && !judge.verdict().empty() && judge.could_be_chance(); ++n) {
    again.seed = redraw_seed(problem.seed, n);
    const Inputs more = random_inputs(again);
    judge.add(run(kernel, d, more, options), expected(d, more));
  }
  return judge.verdict();
}

}  // namespace polyhead::testing
