// What a list of times comes to.
#pragma once

#include <vector>

namespace polyhead::tools {

// 0 <= q <= 1, between neighbours as NumPy has it. `values`, in any order, is not empty.
double quantile(std::vector<double> values, double q);
double median(std::vector<double> values);

// (p90 - p10) / median, in percent.
double spread_percent(const std::vector<double>& values);

}  // namespace polyhead::tools
