// The activations of blocks and products, in float64.
#pragma once

#include <algorithm>
#include <cmath>

#include "polyhead/matrix_product.h"

namespace polyhead::testing {

inline double activated(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::kNone: break;
    case ActivationKind::kRelu: return std::max(x, 0.0);
    case ActivationKind::kGelu: return x * (1 + std::erf(x / std::sqrt(2.0))) / 2;
    case ActivationKind::kGeluTanh: return x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))) / 2;
    case ActivationKind::kSilu: return x / (1 + std::exp(-x));
  }
  return x;
}

}  // namespace polyhead::testing
