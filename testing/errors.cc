#include "testing/errors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>

namespace polyhead::testing {
namespace {

template <class... A>
std::string format(const char* text, A... a) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, text, a...);
  return buffer;
}

double square(double x) { return x * x; }

constexpr double kChance = 14;  // t: one in a million

}  // namespace

Ulp::Ulp(DType dtype) {
  if (dtype == DType::kBFloat16) digits_ = 8;
  if (dtype == DType::kFloat16) digits_ = 11, min_exponent_ = -13;
  if (dtype == DType::kFloat64) digits_ = 53, min_exponent_ = -1021;
}

double Ulp::of(double x) const {
  const int exponent = static_cast<int>(std::bit_cast<uint64_t>(x) >> 52 & 0x7ff) - 1022;  // of frexp()
  const int last = std::max(exponent, min_exponent_) - digits_;
  return last < -1022 ? std::ldexp(1.0, last) : std::bit_cast<double>(static_cast<uint64_t>(last + 1023) << 52);
}

std::string position_text(std::span<const int64_t> dims, int64_t n) {
  std::string text = "]";
  for (size_t d = dims.size(); d-- > 0;) {
    text = (d == 0 ? "[" : ", ") + std::to_string(n % dims[d]) + text;
    n /= dims[d];
  }
  return text;
}

void Errors::add_fault(std::string sentence) {
  judged_ = true;
  faults_.push_back(std::move(sentence));
}

void Errors::add(const Measured& measured) {
  judged_ = true;
  const Ulp of_dtype(measured.dtype);
  const Ulp of_arithmetic(measured.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32);
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
      add_element(measured, n, of_dtype, of_arithmetic);
    }
  }
}

void Errors::add_element(const Measured& measured, size_t n, const Ulp& of_dtype, const Ulp& of_arithmetic) {
  const double exact = measured.exact[n], naive = measured.yardstick[n];
  const double error = measured.got[n] - exact, ulps = 4 * of_dtype.of(measured.magnitude[n]);
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
  const bool is_double = measured.dtype == DType::kFloat64;
  const double unit = of_dtype.of(exact);
  computed_ = !measured.variance.empty();
  const double pairs = measured.pairs.empty() ? 0 : measured.pairs[n];
  const double arithmetic =
      measured.variance.empty() ? square(of_arithmetic.of(measured.magnitude[n])) / 4 : measured.variance[n];
  const double variance = arithmetic + pairs + square(unit) / 12;
  const double outward = exact < 0 ? -1 : 1;  // drift is growth or shrinkage
  count_ += 1;
  sum_ += outward * error;
  square_ += square(error);
  yardstick_sum_ += outward * (naive - exact);
  yardstick_square_ += square(naive - exact);
  yardstick_largest_ = std::max(yardstick_largest_, std::fabs(naive - exact));
  variance_ += variance;
  variance_square_ += square(variance);
  largest_variance_ = std::max(largest_variance_, variance);
  pairs_ += pairs;
  // Ties of 16-bit numbers may all go one way, as may numbers below float32's normal ones, and the ulp of exp.
  one_way_ += is_double || measured.dtype == DType::kFloat32 ? unit / 4 : unit / 8;
  if (!is_double) one_way_ += 0x1p-126;
  if (measured.cut.empty()) return;
  cut_ += outward * measured.cut[n];
  cut_square_ += square(measured.cut[n]);
}

// What it erred by, or should have by chance.
double Errors::yardstick_mean_square() const { return std::max(yardstick_square_ + pairs_, variance_) / count_; }

// The element that strays most may do so by three deviations; where these are not computed, by three of what chance adds
// to those that were seen, which is nothing for many elements.
double Errors::most() const {
  if (count_ == 0) return 0;
  const double variance = computed_ ? largest_variance_ : yardstick_mean_square() * (chance() - 1);
  return bound_.largest * std::max(yardstick_largest_, 3 * std::sqrt(variance));
}

// What the mean of squared errors may be by chance, of what it is on average: that of n normal ones exceeds
// 1 + 2 sqrt(t / n) + 2 t / n with probability exp(-t) (Laurent and Massart, 2000, lemma 1).
double Errors::chance() const { return 1 + 2 * std::sqrt(kChance) * noise() + 2 * kChance * square(noise()); }

// The deviation of the mean of as many errors as are independent and matter, each of deviation 1.
double Errors::noise() const {
  const double of_few = variance_ > 0 ? variance_square_ * count_ / square(variance_) : 1;
  return std::sqrt(std::min(1.0, dependent_share() * of_few));
}

// Of the elements, those that share most of their errors.
double Errors::dependent_share() const { return std::min(1.0, bound_.dependent / count_); }

double Errors::rmse() const { return count_ == 0 ? 0 : std::sqrt(square_ / count_); }

double Errors::allowed_rmse() const {
  if (count_ == 0) return 0;
  return std::sqrt(square(bound_.rmse) * chance() * yardstick_mean_square() + cut_square_ / count_);
}

std::vector<std::string> Errors::complaints() const {
  std::vector<std::string> all = faults_;
  if (too_large()) {
    all.push_back(worst_ + format("%.3g: %.3gx the yardstick's %.3g + 4 ulp", allowed(), bound_.largest,
                                  most() / bound_.largest));
  }
  if (count_ == 0) return all;
  const double yardstick = std::sqrt(yardstick_mean_square());
  if (!(rmse() <= allowed_rmse())) {
    all.push_back(name_ + format(": RMSE %.4g, %.2fx the yardstick's, allowed %.2fx, and %.2fx by chance", rmse(),
                                 rmse() / yardstick, bound_.rmse, allowed_rmse() / yardstick));
  }
  const double drift = std::fabs(sum_ / count_);
  const double deviation = std::sqrt(dependent_share()) * yardstick;
  const double most_drift =
      std::fabs(yardstick_sum_ / count_) + std::sqrt(2 * kChance) * deviation + (one_way_ + std::fabs(cut_)) / count_;
  if (!(drift <= most_drift))
    all.push_back(name_ + format(": mean signed error %.4g, allowed %.4g", drift, most_drift));
  return all;
}

std::string text_of(const Errors& errors) {
  std::string text;
  for (const std::string& complaint : errors.complaints()) text += complaint + "\n";
  return text;
}

Verdict verdict_of(const Errors& errors) {
  const std::vector<std::string> complaints = errors.complaints();
  return {errors.name(),
          errors.error(),
          errors.allowed(),
          errors.rmse(),
          errors.allowed_rmse(),
          complaints.empty(),
          complaints.empty() ? "" : complaints.front()};
}

}  // namespace polyhead::testing
