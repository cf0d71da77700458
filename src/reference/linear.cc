// The operations of linear.h, as it says them.
#include "reference/linear.h"

#include <cmath>
#include <cstring>

#include "reference/epilogue.h"

namespace polyhead::linear {
namespace reference {

template <class T>
void gemm(const GemmDesc& desc, const GemmArgs& args) {
  const Elements<T> A(args.a), B(args.b), C(args.c);
  const EpilogueOf<T> epilogue(args.epilogue, args.c.rows);
  for (int64_t m = 0; m < desc.m; ++m) {
    for (int64_t n = 0; n < desc.n; ++n) {
      T sum = 0;
      for (int64_t k = 0; k < desc.k; ++k) sum += A.get(m, k) * B.get(k, n);
      C.set_or_add(m, n, epilogue(sum, m, n), args.accumulate);
    }
  }
}

template <class T>
void pointwise(const PointwiseArgs& args) {
  const Elements<T> x(args.x), y(args.y), sums(args.sums);
  const EpilogueOf<T> epilogue(args.epilogue, args.y.given() ? args.y.rows : args.x.rows);
  const int64_t num_rows = args.x.rows.size();
  for (int64_t n = 0; n < args.x.columns.size(); ++n) {
    T sum = 0;
    for (int64_t m = 0; m < num_rows; ++m) {
      const T value = epilogue(x.get(m, n), m, n);
      sum += value;
      if (args.y.given()) y.set_or_add(m, n, value, args.accumulate);
    }
    if (args.sums.given()) sums.set_or_add(0, n, sum, args.accumulate_sums);
  }
}

// mean and rstd of a row lie side by side: float64 where x is, else float32.
Matrix statistic(const void* data, const Matrix& x) {
  return matrix(data, x.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32, x.rows.size(), 1);
}

template <class T>
void norm_forward(const NormForwardArgs& args) {
  const Elements<T> x(args.x), residual(args.residual), sum(args.sum), gamma(args.gamma), beta(args.beta), y(args.y);
  const Elements<T> means(statistic(args.mean, args.x)), rstds(statistic(args.rstd, args.x));
  const int64_t num_columns = args.x.columns.size();
  const auto input = [&](int64_t m, int64_t n) {
    if (!args.residual.given()) return x.get(m, n);
    const T both = x.get(m, n) + residual.get(m, n);
    T rounded = both;
    with_element_type(args.x.dtype, [&](auto type) { rounded = widen<T>(narrow<decltype(type)>(both)); });
    return rounded;
  };
  for (int64_t m = 0; m < args.x.rows.size(); ++m) {
    T mean = 0, square = 0;
    if (args.norm == Norm::kLayerNorm) {
      for (int64_t n = 0; n < num_columns; ++n) mean += input(m, n);
      mean /= static_cast<T>(num_columns);
    }
    for (int64_t n = 0; n < num_columns; ++n) square += (input(m, n) - mean) * (input(m, n) - mean);
    const T rstd = 1 / std::sqrt(square / static_cast<T>(num_columns) + static_cast<T>(args.eps));
    for (int64_t n = 0; n < num_columns; ++n) {
      const T value = input(m, n);
      if (args.sum.given()) sum.set(m, n, value);
      const T scaled = (value - mean) * rstd * (args.gamma.given() ? gamma.get(0, n) : T(1));
      y.set(m, n, args.beta.given() ? scaled + beta.get(0, n) : scaled);
    }
    if (args.mean != nullptr && args.norm == Norm::kLayerNorm) means.set(m, 0, mean);
    if (args.rstd != nullptr) rstds.set(m, 0, rstd);
  }
}

template <class T>
void norm_backward(const NormBackwardArgs& args) {
  const Elements<T> x(args.x), gamma(args.gamma), grad_y(args.grad_y), residual(args.residual), grad_x(args.grad_x);
  const Elements<T> grad_gamma(args.grad_gamma), grad_beta(args.grad_beta);
  const Elements<T> means(statistic(args.mean, args.x)), rstds(statistic(args.rstd, args.x));
  const int64_t num_rows = args.x.rows.size(), num_columns = args.x.columns.size();
  const bool centred = args.norm == Norm::kLayerNorm;
  const auto normed = [&](int64_t m, int64_t n) {
    return (x.get(m, n) - (centred ? means.get(m, 0) : T(0))) * rstds.get(m, 0);
  };
  // The gradients of the parameters first: grad_x may be grad_y.
  for (int64_t n = 0; n < num_columns; ++n) {
    T sum_gamma = 0, sum_beta = 0;
    for (int64_t m = 0; m < num_rows; ++m) {
      sum_gamma += grad_y.get(m, n) * normed(m, n);
      sum_beta += grad_y.get(m, n);
    }
    if (args.grad_gamma.given()) grad_gamma.set_or_add(0, n, sum_gamma, args.accumulate_parameters);
    if (args.grad_beta.given()) grad_beta.set_or_add(0, n, sum_beta, args.accumulate_parameters);
  }
  if (!args.grad_x.given()) return;
  const auto grad_normed = [&](int64_t m, int64_t n) {
    return args.gamma.given() ? grad_y.get(m, n) * gamma.get(0, n) : grad_y.get(m, n);
  };
  for (int64_t m = 0; m < num_rows; ++m) {
    T mean = 0, projection = 0;  // of the gradient, and of it times what was normed
    for (int64_t n = 0; n < num_columns; ++n) {
      if (centred) mean += grad_normed(m, n);
      projection += grad_normed(m, n) * normed(m, n);
    }
    mean /= static_cast<T>(num_columns);
    projection /= static_cast<T>(num_columns);
    for (int64_t n = 0; n < num_columns; ++n) {
      T value = (grad_normed(m, n) - mean - normed(m, n) * projection) * rstds.get(m, 0);
      if (args.residual.given()) value += residual.get(m, n);
      grad_x.set_or_add(m, n, value, args.accumulate_x);
    }
  }
}

template void gemm<float>(const GemmDesc&, const GemmArgs&);
template void gemm<double>(const GemmDesc&, const GemmArgs&);
template void pointwise<float>(const PointwiseArgs&);
template void pointwise<double>(const PointwiseArgs&);
template void norm_forward<float>(const NormForwardArgs&);
template void norm_forward<double>(const NormForwardArgs&);
template void norm_backward<float>(const NormBackwardArgs&);
template void norm_backward<double>(const NormBackwardArgs&);

namespace {

// B row-major in its own dtype.
Matrix packed_view(const void* packed, int64_t k, int64_t n, DType dtype) { return matrix(packed, dtype, k, n); }

Status pack(const Matrix& b, void* packed, const Run&) {
  const Matrix to = packed_view(packed, b.rows.size(), b.columns.size(), b.dtype);
  const Elements<double> from(b), copy(to);
  for (int64_t k = 0; k < b.rows.size(); ++k) {
    for (int64_t n = 0; n < b.columns.size(); ++n) copy.set(k, n, from.get(k, n));
  }
  return {};
}

Status gemm_packed_or_not(const GemmDesc& desc, const GemmArgs& args, const Run&) {
  GemmArgs plain = args;
  if (desc.prepacked) plain.b = packed_view(args.prepacked, desc.k, desc.n, desc.dtype);
  gemm<double>(desc, plain);
  return {};
}

int64_t integer(const Tensor& t, int64_t i, int64_t j) {
  const int64_t at = (t.dims[0] > 1 ? i * t.strides[0] : 0) + (t.dims[1] > 1 ? j * t.strides[1] : 0);
  return t.dtype == DType::kInt32 ? static_cast<const int32_t*>(t.data)[at] : static_cast<const int64_t*>(t.data)[at];
}

Status copy_rows(const CopyRowsArgs& args, const Run&) {
  const Elements<double> x(args.x), y(args.y);
  const int64_t beams = args.x.rows.sizes[1], time = args.x.rows.sizes[2];
  for (int64_t m = 0; m < args.x.rows.size(); ++m) {
    const int64_t t = m % time, beam = m / time % beams, batch = m / time / beams;
    bool seen = false;
    for (const Tensor& lengths : args.lengths) seen = seen || (lengths.given() && t < integer(lengths, batch, beam));
    for (int64_t n = 0; n < args.x.columns.size(); ++n) y.set(m, n, seen ? x.get(m, n) : 0);
  }
  return {};
}

Status sum_heads(const SumHeadsArgs& args, const Run&) {
  const Elements<double> x(args.x), y(args.y);
  const int64_t num_columns = args.y.columns.size();
  for (int64_t m = 0; m < args.y.rows.size(); ++m) {
    for (int64_t n = 0; n < num_columns; ++n) {
      double sum = args.accumulate ? y.get(m, n) : 0;
      for (int64_t h = 0; h < args.num_heads; ++h) sum += x.get(m, h * num_columns + n);
      y.set(m, n, sum);
    }
  }
  return {};
}

Status clear(void* data, size_t bytes, const Run&) {
  if (bytes > 0) std::memset(data, 0, bytes);
  return {};
}

}  // namespace
}  // namespace reference

constexpr Kernel kReference = {
    "reference",
    Device::kCpu,
    [](DType dtype) {
      const bool floating =
          dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kFloat64;
      return floating ? std::string() : std::string("dtype is ") + dtype_name(dtype) + ", takes floating point";
    },
    [](int64_t k, int64_t n, DType dtype) { return MemorySize(k) * n * dtype_size_bytes(dtype); },
    reference::pack,
    [] { return int64_t{0}; },
    [](const GemmDesc&, int) { return MemorySize(); },
    reference::gemm_packed_or_not,
    [](int64_t, int64_t, DType) { return MemorySize(); },
    [](const PointwiseArgs& args, const Run&) {
      reference::pointwise<double>(args);
      return Status();
    },
    [](const NormForwardArgs& args, const Run&) {
      reference::norm_forward<double>(args);
      return Status();
    },
    [](const NormBackwardArgs& args, const Run&) {
      reference::norm_backward<double>(args);
      return Status();
    },
    reference::copy_rows,
    reference::sum_heads,
    reference::clear};

}  // namespace polyhead::linear
