// How much the scores of a row may be off, one rounding after the other: what deviation.cc goes on from.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "testing/bounds.h"
#include "testing/scores.h"

namespace polyhead::testing {

inline double squared(double x) { return x * x; }

// The variance of an error that is uniform up to `most` of a number whose leading digits are distributed as 1 / x: the
// mean of 1 / x^2 over [1, 2) is then 0.54.
inline double rounding(double most) { return most * most / 3 * 0.54; }

// What one operation errs by, of its result squared.
inline double one_operation(const AttentionDesc& desc) {
  return rounding(desc.dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24);
}

// Dots of one row with columns [dim, count]: each with the sum of the squares of what its operations gave, and with what
// tensor cores shift it by.
class Dots {
 public:
  void compute(const double* row, const double* columns, int64_t dim, int64_t count) {
    sums.assign(static_cast<size_t>(count), 0);
    squares.assign(static_cast<size_t>(count), 0);
    cuts.assign(static_cast<size_t>(count), 0);
    for (int64_t c = 0; c < dim; ++c) {
      for (int64_t j = 0; j < count; ++j) {
        const double product = row[c] * columns[c * count + j];
        sums[j] += product;
        squares[j] += product * product + sums[j] * sums[j];
      }
      if ((c + 1) % kAddedAtATime != 0 && c + 1 < dim) continue;
      for (int64_t j = 0; j < count; ++j) cuts[j] -= kCut * sums[j];
    }
  }

  std::vector<double> sums, squares, cuts;
};

// What a score program does to the errors of one pair: of what it is given and of its own operations.
struct Through {
  double slope = 1;     // of the score that comes out, by the one that came in
  double own = 0;       // variance of what comes out, by the program's operations
  double of_slope = 0;  // variance of the slope
};

// The scores of a row and the variance of their errors.
class ScoreErrors {
 public:
  ScoreErrors(const AttentionDesc& desc, const Inputs& in, const Visibility& seen)
      : d_(desc), scores_(desc, in, seen), e_(one_operation(desc)) {}

  Scores<double>& scores() { return scores_; }
  const Scores<double>& scores() const { return scores_; }

  void row(int64_t b, int64_t h, int64_t i) {
    scores_.dots(b, h, i);
    const double* Q = scores_.Q().data() + scores_.q_row(b, h, i) * d_.head_dim;
    dots_.compute(Q, scores_.keys_by_dim(), d_.head_dim, scores_.num_keys());
  }

  // X = scale * dot, with a scale that is rounded itself.
  double of_X(int64_t j) const {
    return e_ * squared(scores_.scale()) * (dots_.squares[j] + 2 * squared(dots_.sums[j]));
  }

  // What the program is given: tanh within some ulp, then whatever is added.
  double of_given(int64_t j, const Scores<double>::Score& score) const {
    const double X = of_X(j), S = 3 * e_ * squared(score.given);
    if (d_.softcap == 0) return X + S;
    return squared(1 - squared(score.t)) * X + 4 * e_ * squared(d_.softcap * score.t) + S;
  }

  // Of score(b, h, i, j); afterwards the program's adjoints are those of this pair.
  Through through(int64_t b, int64_t h, int64_t i, int64_t j, const Scores<double>::Score& score) const {
    const PairProgram<double>& program = scores_.program();
    if (!program.has_score()) return {};
    const double step = 1e-5 * std::max(1.0, std::fabs(score.given));
    double slopes[2];
    for (int side = 0; side < 2; ++side) {
      program.score(scores_.place(b, h, i, j), score.given + (side == 0 ? -step : step));
      slopes[side] = program.differentiate(1);
    }
    program.score(scores_.place(b, h, i, j), score.given);
    Through through;
    through.slope = program.differentiate(1);
    const auto roundings = program.roundings(*d_.program);
    through.own = e_ * roundings.squares;
    through.of_slope = e_ * roundings.steps * squared(through.slope) +
                       squared((slopes[1] - slopes[0]) / (2 * step)) * of_given(j, score);
    return through;
  }

  // What tensor cores shift the score by.
  double cut(int64_t j, const Scores<double>::Score& score, const Through& through) const {
    return through.slope * (1 - squared(score.t)) * scores_.scale() * dots_.cuts[j];
  }

  static double of_S(double of_given, const Through& through) {
    return squared(through.slope) * of_given + through.own;
  }

  // The exponent S - m, and exp within some ulp; a weight below float32's normal numbers may be taken for 0.
  double of_exponent(double of_S, double exponent) const {
    return may_be_lost(exponent) ? 1 : of_S + e_ * (2 * squared(exponent) + 4);
  }
  static bool may_be_lost(double exponent) { return exponent < -87; }

  double operation() const { return e_; }

 private:
  const AttentionDesc& d_;
  Scores<double> scores_;
  const double e_;
  Dots dots_;
};

}  // namespace polyhead::testing
