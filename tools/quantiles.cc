#include "quantiles.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace polyhead::tools {

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const double at = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (at - static_cast<double>(below)) * (values[above] - values[below]);
}

double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

double spread_percent(const std::vector<double>& values) {
  return 100 * (quantile(values, 0.9) - quantile(values, 0.1)) / median(values);
}

}  // namespace polyhead::tools
