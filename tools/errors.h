// Whether numbers are as near to the exact ones as docs/semantics.md asks, by the yardstick of error:
//
// - Largest error <= 2x the yardstick's (gradients 3x) + 4 ulp of the sum of the absolute values of the terms.
// - RMSE <= a factor of the yardstick's, and no drift of the mean signed error, where there are 4096 elements or more.
//   The yardstick counts as half an ulp of float32 at least.
// - NaN and inf where the exact ones have them; the exact value itself where no term contributes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "polyhead/tensor.h"

namespace polyhead::tools {

// The distance from |x| to the next number of `dtype`.
double ulp(double x, DType dtype);

// "[0, 3, 1]": where element n, counted in row-major order, stands.
std::string position_text(std::span<const int64_t> dims, int64_t n);

// A tensor that somebody wrote, beside what should stand there: elements in row-major order.
struct Measured {
  DType dtype = DType::kFloat32;
  std::span<const int64_t> dims;
  std::span<const double> got, exact, yardstick;
  std::span<const double> magnitude;  // the sum of the absolute values of the terms; 0: no term contributes
};

// What the errors of one output are held to.
struct Bound {
  double largest = 2;    // times the yardstick's
  double rmse = 1.1;     // times the yardstick's
  double dependent = 1;  // how many neighbours share most of their error
  bool cancels = false;  // terms may cancel by design: the arithmetic's ulp is that of the magnitude, not of the result
};

// The errors of one output, over any number of draws.
class Errors {
 public:
  Errors() = default;
  Errors(std::string name, const Bound& bound) : name_(std::move(name)), bound_(bound) {}

  void add(const Measured& measured);
  void add_fault(std::string sentence);  // what is no rounding error

  const std::string& name() const { return name_; }
  std::vector<std::string> complaints() const;  // none if good
  // Of the element that fails worst, else of the one with the largest error.
  double error() const { return faulty_ ? fault_error_ : too_large() ? excess_ + excess_ulps_ : largest_; }
  double allowed() const { return faulty_ ? 0 : most() + (too_large() ? excess_ulps_ : largest_ulps_); }

  // Errors are random: with few rows an honest kernel may be unlucky where the yardstick is lucky. More draws help.
  bool could_be_chance() const { return faults_.empty() && excess_ <= 20 * (yardstick_largest_ + ulps_); }

 private:
  void add_element(const Measured& measured, size_t n);
  double most() const { return bound_.largest * yardstick_largest_; }
  bool too_large() const { return excess_ > most(); }

  std::string name_;
  Bound bound_;
  std::vector<std::string> faults_;
  bool faulty_ = false;  // an element that must be the exact one is not: by fault_error_
  double fault_error_ = 0;
  double largest_ = 0, largest_ulps_ = 0;  // error, and the 4 ulp there
  double excess_ = 0, excess_ulps_ = 0;    // largest error less 4 ulp, and these
  std::string worst_;                      // where
  double ulps_ = 0;                        // the largest 4 ulp
  double yardstick_largest_ = 0, count_ = 0, ulp_square_ = 0;
  double sum_ = 0, yardstick_sum_ = 0, square_ = 0, yardstick_square_ = 0;
};

// How often a problem is drawn again whose errors could be chance, and the seed of draw n.
int64_t num_redraws(int64_t num_rows);
uint64_t redraw_seed(uint64_t seed, int64_t n);

}  // namespace polyhead::tools
