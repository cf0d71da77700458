// Whether numbers are as near to the exact ones as docs/semantics.md asks, by the yardstick of error:
//
// - Largest error <= 2x the yardstick's (gradients 3x) + 4 ulp of the sum of the absolute values of the terms.
// - RMSE <= a factor of the yardstick's, and no drift of the mean signed error, but for the chance that so many elements
//   leave (docs/decisions/0009). What the yardstick should err by on average (deviation.h) counts where by chance it
//   erred by less.
// - NaN and inf where the exact ones have them; the exact value itself where no term contributes.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "polyhead/tensor.h"

namespace polyhead::testing {

// The distance from |x| to the next number of a dtype.
class Ulp {
 public:
  explicit Ulp(DType dtype);
  double of(double x) const;

 private:
  int digits_ = 24, min_exponent_ = -125;
};

// "[0, 3, 1]": where element n, counted in row-major order, stands.
std::string position_text(std::span<const int64_t> dims, int64_t n);

// A tensor that somebody wrote, beside what should stand there: elements in row-major order.
struct Measured {
  DType dtype = DType::kFloat32;
  std::span<const int64_t> dims;
  std::span<const double> got, exact, yardstick;
  std::span<const double> magnitude;  // the sum of the absolute values of the terms; 0: no term contributes
  // Of the errors of honest arithmetic, before the result is rounded; empty: half an ulp of the magnitude, squared.
  std::span<const double> variance = {};
  std::span<const double> pairs =
      {};  // what multiplying pairs of bfloat16 adds to it, and to what the yardstick erred by
  std::span<const double> cut = {};  // what tensor cores shift elements by, or less
};

// What the errors of one output are held to.
struct Bound {
  double largest = 2;    // times the yardstick's
  double rmse = 1.1;     // times the yardstick's
  double dependent = 1;  // how many neighbours share most of their error; HUGE_VAL: all, in all draws
};

// The errors of one output, over any number of draws.
class Errors {
 public:
  Errors() = default;
  Errors(std::string name, const Bound& bound) : name_(std::move(name)), bound_(bound) {}

  void add(const Measured& measured);
  void add_fault(std::string sentence);  // what is no rounding error

  const std::string& name() const { return name_; }
  bool judged() const { return judged_; }       // whether anything was added
  std::vector<std::string> complaints() const;  // none if good
  // Of the element that fails worst, else of the one with the largest error.
  double error() const { return faulty_ ? fault_error_ : too_large() ? excess_ + excess_ulps_ : largest_; }
  double allowed() const { return faulty_ ? 0 : most() + (too_large() ? excess_ulps_ : largest_ulps_); }
  double rmse() const;
  double allowed_rmse() const;

 private:
  void add_element(const Measured& measured, size_t n, const Ulp& of_dtype, const Ulp& of_arithmetic);
  double yardstick_mean_square() const;
  double most() const;
  double noise() const;
  double dependent_share() const;
  double chance() const;
  bool too_large() const { return excess_ > most(); }

  std::string name_;
  Bound bound_;
  bool judged_ = false;
  bool computed_ = false;  // the variance is
  std::vector<std::string> faults_;
  bool faulty_ = false;  // an element that must be the exact one is not: by fault_error_
  double fault_error_ = 0;
  double largest_ = 0, largest_ulps_ = 0;  // error, and the 4 ulp there
  double excess_ = 0, excess_ulps_ = 0;    // largest error less 4 ulp, and these
  std::string worst_;                      // where
  double yardstick_largest_ = 0, count_ = 0;
  double sum_ = 0, yardstick_sum_ = 0, square_ = 0, yardstick_square_ = 0;
  // Of the elements' variances: sum, sum of squares, largest; what pairs add to them; what may go one way in all.
  double variance_ = 0, variance_square_ = 0, largest_variance_ = 0, pairs_ = 0, one_way_ = 0;
  double cut_ = 0, cut_square_ = 0;  // of their shifts: outward sum, sum of squares
};

struct Verdict {
  std::string output;             // "out", "grad_query", ...
  double error = 0, allowed = 0;  // of the element that fails worst, else of the one with the largest error
  double rmse = 0, allowed_rmse = 0;
  bool passed = true;
  std::string fault;  // the first complaint
};

Verdict verdict_of(const Errors& errors);

// All complaints, a line for each.
std::string text_of(const Errors& errors);

}  // namespace polyhead::testing
