#include "errors.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace polyhead::tools {
namespace {

template <class... A>
std::string format(const char* text, A... a) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, text, a...);
  return buffer;
}

}  // namespace

double ulp(double x, DType dtype) {
  int digits = 24, min_exponent = -125;
  if (dtype == DType::kBFloat16) digits = 8;
  if (dtype == DType::kFloat16) digits = 11, min_exponent = -13;
  if (dtype == DType::kFloat64) digits = 53, min_exponent = -1021;
  int exponent = 0;
  std::frexp(x, &exponent);
  return std::ldexp(1.0, std::max(exponent, min_exponent) - digits);
}

std::string position_text(std::span<const int64_t> dims, int64_t n) {
  std::string text = "]";
  for (size_t d = dims.size(); d-- > 0;) {
    text = (d == 0 ? "[" : ", ") + std::to_string(n % dims[d]) + text;
    n /= dims[d];
  }
  return text;
}

void Errors::add_fault(std::string sentence) { faults_.push_back(std::move(sentence)); }

void Errors::add(const Measured& measured) {
  for (size_t n = 0; n < measured.exact.size(); ++n) {
    const double got = measured.got[n], exact = measured.exact[n], naive = measured.yardstick[n];
    if (std::isfinite(exact) && !std::isfinite(naive) && !std::isfinite(got)) continue;  // float32 overflows
    const bool same = std::isnan(exact) ? std::isnan(got) : got == exact;
    const bool must_be_same = !std::isfinite(exact) || measured.magnitude[n] == 0;
    if ((must_be_same || !std::isfinite(got)) && !same) {
      if (faulty_) continue;
      faulty_ = true;
      fault_error_ = std::isnan(got) || std::isnan(exact) ? NAN : std::fabs(got - exact);
      faults_.push_back(name_ + position_text(measured.dims, static_cast<int64_t>(n)) +
                        format(" is %.9g, expected %.9g", got, exact));
    } else if (std::isfinite(exact)) {
      add_element(measured, n);
    }
  }
}

void Errors::add_element(const Measured& measured, size_t n) {
  const double exact = measured.exact[n], naive = measured.yardstick[n];
  const double error = measured.got[n] - exact, ulps = 4 * ulp(measured.magnitude[n], measured.dtype);
  ulps_ = std::max(ulps_, ulps);
  if (std::fabs(error) >= largest_) {
    largest_ = std::fabs(error);
    largest_ulps_ = ulps;
  }
  if (std::fabs(error) - ulps > excess_) {
    excess_ = std::fabs(error) - ulps;
    excess_ulps_ = ulps;
    worst_ = name_ + position_text(measured.dims, static_cast<int64_t>(n)) +
             format(" is %.9g, expected %.9g +- ", measured.got[n], exact);
  }
  if (!std::isfinite(naive)) return;
  yardstick_largest_ = std::max(yardstick_largest_, std::fabs(naive - exact));
  const double outward = exact < 0 ? -1 : 1;  // drift is growth or shrinkage
  const DType arithmetic = measured.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const double unit = ulp(bound_.cancels ? measured.magnitude[n] : exact, arithmetic);
  count_ += 1;
  sum_ += outward * error;
  yardstick_sum_ += outward * (naive - exact);
  square_ += error * error;
  yardstick_square_ += (naive - exact) * (naive - exact);
  ulp_square_ += unit * unit;
}

std::vector<std::string> Errors::complaints() const {
  std::vector<std::string> all = faults_;
  if (too_large()) {
    all.push_back(worst_ +
                  format("%.3g: %gx the yardstick's %.3g + 4 ulp", allowed(), bound_.largest, yardstick_largest_));
  }
  if (count_ < 4096) return all;
  // The naive sum of one term is exact, which says nothing: the yardstick errs by half an ulp at least.
  const double unit = std::sqrt(ulp_square_ / count_), rmse = std::sqrt(square_ / count_);
  const double yardstick = std::max(std::sqrt(yardstick_square_ / count_), unit / 2);
  const double noise = 1 / std::sqrt(count_ / bound_.dependent);
  if (!(rmse <= bound_.rmse * (1 + 2 * noise) * yardstick)) {
    all.push_back(name_ + format(": RMSE %.4g, %.2fx the yardstick's, allowed %.2fx + %.2f of noise", rmse,
                                 rmse / yardstick, bound_.rmse, 2 * noise * bound_.rmse));
  }
  const double drift = std::fabs(sum_ / count_);
  const double most = std::fabs(yardstick_sum_ / count_) + 6 * noise * rmse + unit / 4;
  if (!(drift <= most)) all.push_back(name_ + format(": mean signed error %.4g, allowed %.4g", drift, most));
  return all;
}

int64_t num_redraws(int64_t num_rows) { return std::clamp<int64_t>(4096 / std::max<int64_t>(num_rows, 1), 4, 64); }

uint64_t redraw_seed(uint64_t seed, int64_t n) { return seed + 1000003 * static_cast<uint64_t>(n + 1); }

}  // namespace polyhead::tools
