// What a backward makes of a softmax and of the gradient that meets it, as a sum of products. The weights are E / z, z the
// sum of E over the keys; so whatever an exporter writes for P * (dP - sum(P * dP)), it is the same sum in the end.
#pragma once

#include <compare>
#include <map>
#include <optional>

namespace polyhead::graph {

// Powers of what has the scores' dims: exp(scores), dropout's mask of zeros and ones, the slope of what is done to the
// product's scores ahead of the softmax (slopes.h).
struct Powers {
  int exp = 0, kept = 0, slope = 0;
  auto operator<=>(const Powers&) const = default;
};

struct Term {
  enum Kind {
    kPlain,
    kGradient,  // times dP, the gradient of the weights that the values saw
    kRowSum,    // times the sum over the keys of `summed` times dP
  };
  Powers powers = {};
  int row = 0;  // the power of z
  Kind kind = kPlain;
  Powers summed = {};
  auto operator<=>(const Term&) const = default;
};

// Each term's number. Operations that leave these sums give nothing.
using Terms = std::map<Term, double>;

Terms number_of(double number);
Terms weights_of(bool dropped);
// Of what the softmax takes; or, with its slope, of the product's scores, but for the scale.
Terms scores_gradient_of(bool dropped, bool with_slope);

Terms sum(const Terms& a, const Terms& b, double times_b);
std::optional<Terms> product(const Terms& a, const Terms& b);
std::optional<Terms> power(const Terms& a, int exponent);
std::optional<Terms> row_sum(const Terms& a);  // over the keys

bool has_gradient(const Terms& a);

// a / b, where that is a number, and not 0.
std::optional<double> ratio(const Terms& a, const Terms& b);

bool nearly(double a, double b);

}  // namespace polyhead::graph
