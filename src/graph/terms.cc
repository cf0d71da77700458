#include "graph/terms.h"

#include <algorithm>
#include <cmath>

namespace polyhead::graph {
namespace {

constexpr size_t kMostTerms = 16;
constexpr int kHighestPower = 8;

Powers product(const Powers& a, const Powers& b) {
  return {a.exp + b.exp, std::min(a.kept + b.kept, 1), a.slope + b.slope};
}

}  // namespace

bool nearly(double a, double b) {
  const double difference = std::fabs(a - b);
  return std::isfinite(difference) && difference <= 1e-5 * std::max(std::fabs(a), std::fabs(b));
}

Terms number_of(double number) { return {{Term{}, number}}; }

Terms weights_of(bool dropped) { return {{Term{{1, dropped, 0}, -1}, 1}}; }

Terms scores_gradient_of(bool dropped, bool with_slope) {
  const Powers kept = {1, dropped, 0};
  const Terms of_softmax = {{Term{kept, -1, Term::kGradient}, 1}, {Term{{1, 0, 0}, -2, Term::kRowSum, kept}, -1}};
  return with_slope ? *product(of_softmax, {{Term{{0, 0, 1}}, 1}}) : of_softmax;
}

Terms sum(const Terms& a, const Terms& b, double times_b) {
  Terms result = a;
  for (const auto& [term, number] : b) result[term] += times_b * number;
  std::erase_if(result, [](const auto& each) { return each.second == 0; });
  return result;
}

std::optional<Terms> product(const Terms& a, const Terms& b) {
  Terms result;
  for (const auto& [left, m] : a) {
    for (const auto& [right, n] : b) {
      if (left.kind != Term::kPlain && right.kind != Term::kPlain) return std::nullopt;
      Term both = left.kind != Term::kPlain ? left : right;
      both.powers = product(left.powers, right.powers);
      both.row = left.row + right.row;
      result[both] += m * n;
      const int highest = std::max({std::abs(both.row), std::abs(both.powers.exp), std::abs(both.powers.slope)});
      if (highest > kHighestPower || result.size() > kMostTerms) return std::nullopt;
    }
  }
  return result;
}

std::optional<Terms> power(const Terms& a, int exponent) {
  if (a.size() != 1 || std::abs(exponent) > 2) return std::nullopt;
  Term term = a.begin()->first;
  const double number = a.begin()->second;
  if (term.kind != Term::kPlain || (term.powers.kept != 0 && exponent < 1)) return std::nullopt;
  term.powers.exp *= exponent;
  term.powers.slope *= exponent;
  term.row *= exponent;
  return Terms{{term, std::pow(number, exponent)}};
}

std::optional<Terms> row_sum(const Terms& a) {
  constexpr double kRounding = 1e-9;
  Terms result;
  double largest = 0;
  for (const auto& [term, number] : a) {
    Term summed = term;
    summed.powers = {};
    if (term.kind == Term::kGradient) {
      summed.kind = Term::kRowSum;
      summed.summed = term.powers;
    } else if (term.powers == Powers{1, 0, 0}) {
      summed.row += 1;
    } else {
      return std::nullopt;
    }
    result[summed] += number;
    largest = std::max(largest, std::fabs(number));
  }
  std::erase_if(result, [&](const auto& each) { return std::fabs(each.second) <= kRounding * largest; });
  return result;
}

bool has_gradient(const Terms& a) {
  return std::any_of(a.begin(), a.end(), [](const auto& each) { return each.first.kind != Term::kPlain; });
}

std::optional<double> ratio(const Terms& a, const Terms& b) {
  if (a.size() != b.size() || a.empty()) return std::nullopt;
  const double first = a.begin()->second / b.begin()->second;
  if (first == 0 || !std::isfinite(first)) return std::nullopt;
  for (auto left = a.begin(), right = b.begin(); left != a.end(); ++left, ++right) {
    if (left->first != right->first || !nearly(left->second, first * right->second)) return std::nullopt;
  }
  return first;
}

}  // namespace polyhead::graph
