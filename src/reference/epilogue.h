// Elements of matrices, and what an epilogue makes of one.
#pragma once

#include <cmath>

#include "contract/linear.h"
#include "core/dtype.h"
#include "core/philox.h"

namespace polyhead::linear::reference {

template <class T>
class Elements {
 public:
  explicit Elements(const Matrix& matrix) : matrix_(matrix) {}

  T get(int64_t row, int64_t column) const {
    return static_cast<T>(load_element(matrix_.data, matrix_.dtype, at(row, column)));
  }
  void set(int64_t row, int64_t column, T value) const {
    store_element(matrix_.data, matrix_.dtype, at(row, column), static_cast<double>(value));
  }
  // The value that set() leaves.
  void set_or_add(int64_t row, int64_t column, T value, bool add) const {
    set(row, column, add ? get(row, column) + value : value);
  }

 private:
  int64_t at(int64_t row, int64_t column) const { return matrix_.rows.offset(row) + matrix_.columns.offset(column); }

  Matrix matrix_;
};

template <class T>
T activation(Activation function, T x) {
  switch (function) {
    case Activation::kRelu: return x < 0 ? T(0) : x;
    case Activation::kGelu: return x * (1 + std::erf(x * T(M_SQRT1_2))) / 2;
    case Activation::kGeluTanh:
      return x * (1 + std::tanh(T(M_2_SQRTPI * M_SQRT1_2) * (x + T(0.044715) * x * x * x))) / 2;
    case Activation::kSilu: return x / (1 + std::exp(-x));
    case Activation::kNone: break;
  }
  return x;
}

template <class T>
T activation_derivative(Activation function, T x) {
  switch (function) {
    case Activation::kRelu: return x <= 0 ? T(0) : x - x + 1;  // NaN stays NaN
    case Activation::kGelu: {
      const T density = T(M_2_SQRTPI * M_SQRT1_2 / 2) * std::exp(-x * x / 2);
      return (1 + std::erf(x * T(M_SQRT1_2))) / 2 + x * density;
    }
    case Activation::kGeluTanh: {
      const T scale = T(M_2_SQRTPI * M_SQRT1_2);
      const T tanh = std::tanh(scale * (x + T(0.044715) * x * x * x));
      return (1 + tanh) / 2 + x * (1 - tanh * tanh) / 2 * scale * (1 + T(3 * 0.044715) * x * x);
    }
    case Activation::kSilu: {
      const T sigmoid = 1 / (1 + std::exp(-x));
      return sigmoid * (1 + x * (1 - sigmoid));
    }
    case Activation::kNone: break;
  }
  return 1;
}

// Rows of `rows` decide the counters of dropout.
template <class T>
class EpilogueOf {
 public:
  EpilogueOf(const Epilogue& epilogue, const Axis& rows)
      : epilogue_(epilogue),
        bias_(epilogue.bias),
        pre_activation_(epilogue.pre_activation),
        residual_(epilogue.residual),
        rows_(rows),
        threshold_(dropout_threshold(epilogue.dropout.p)) {}

  T operator()(T x, int64_t row, int64_t column) const {
    if (epilogue_.bias.given()) x += bias_.get(0, column);
    if (epilogue_.gradient) {
      x = dropout(x, row, column);
      if (epilogue_.activation != Activation::kNone) {
        x *= activation_derivative(epilogue_.activation, pre_activation_.get(row, column));
      }
    } else {
      if (epilogue_.pre_activation.given()) pre_activation_.set(row, column, x);
      x = dropout(activation(epilogue_.activation, x), row, column);
    }
    if (epilogue_.residual.given()) x += residual_.get(row, column);
    return x;
  }

 private:
  T dropout(T x, int64_t row, int64_t column) const {
    const MatrixDropout& d = epilogue_.dropout;
    if (threshold_ == 0) return x;
    const int64_t inner = rows_.sizes[2];
    const uint32_t bits =
        dropout_bits(d.seed, d.offset, static_cast<uint32_t>(row / inner), static_cast<uint32_t>(row % inner), column);
    return bits >= threshold_ ? x * static_cast<T>(1 / (1 - d.p)) : T(0);
  }

  const Epilogue& epilogue_;
  Elements<T> bias_, pre_activation_, residual_;
  Axis rows_;
  uint32_t threshold_;
};

}  // namespace polyhead::linear::reference
