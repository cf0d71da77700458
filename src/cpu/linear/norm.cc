// LayerNorm and RMSNorm, forward and backward, a row at a time: what is read three times lies in the L1 cache.
#include "cpu/linear/line.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

using linear::Norm;

// Four vectors of sums, of elements that lie 4 vectors apart: rounding errors stay small, and no addition waits for the
// one before.
struct RowSum {
  F sum[4] = {broadcast(0.0f), broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};

  float total() const {
    alignas(64) float lanes[kLanes];
    store(lanes, (sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
  }
};

// Calls step(at, n, v): n <= kLanes elements from `at` on, v counting 0 to 3 in turn.
template <class Step>
inline void for_each_vector(int64_t n, const Step& step) {
  int64_t at = 0;
  for (; at + 4 * kLanes <= n; at += 4 * kLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) step(at + v * kLanes, kLanes, v);
  }
  for (int v = 0; at < n; at += kLanes, ++v) step(at, n - at < kLanes ? static_cast<int>(n - at) : kLanes, v);
}

// Lanes from n on become 0.
inline F first_lanes_of(F x, int n) {
  return n == kLanes ? x : select(mask_from_bits((1u << n) - 1), x, broadcast(0.0f));
}

// What a row's norm is taken of: x, or x + residual rounded to x's type.
struct NormInput {
  Line x, residual;

  F load(int64_t at, int n) const {
    const F value = load_line(x, at, n);
    return residual.data == nullptr ? value : rounded(value + load_line(residual, at, n), x.dtype);
  }
};

inline void set_statistic(void* data, int64_t row, float value) {
  if (data != nullptr) static_cast<float*>(data)[row] = value;
}

void norm_row(const linear::NormForwardArgs& args, int64_t n, int64_t row) {
  NormInput input{row_of(args.x, row), row_of(args.residual, row)};
  const Line sum = row_of(args.sum, row), y = row_of(args.y, row);
  const Line gamma = row_of(args.gamma, 0), beta = row_of(args.beta, 0);
  if (sum.data != nullptr) {
    for_each_vector(n, [&](int64_t at, int count, int) { store_line(sum, at, input.load(at, count), count); });
    input = {sum, {}};
  }
  const float size = static_cast<float>(n);
  float mean = 0;
  if (args.norm == Norm::kLayerNorm) {
    RowSum total;
    for_each_vector(n, [&](int64_t at, int count, int v) { total.sum[v] = total.sum[v] + input.load(at, count); });
    mean = total.total() / size;
    set_statistic(args.mean, row, mean);
  }
  RowSum square;
  for_each_vector(n, [&](int64_t at, int count, int v) {
    const F centred = first_lanes_of(input.load(at, count) - broadcast(mean), count);
    square.sum[v] = fma(centred, centred, square.sum[v]);
  });
  const float rstd = 1 / __builtin_sqrtf(square.total() / size + static_cast<float>(args.eps));
  set_statistic(args.rstd, row, rstd);
  for_each_vector(n, [&](int64_t at, int count, int) {
    F value = (input.load(at, count) - broadcast(mean)) * broadcast(rstd);
    if (gamma.data != nullptr) value = value * load_line(gamma, at, count);
    if (beta.data != nullptr) value = value + load_line(beta, at, count);
    store_line(y, at, value, count);
  });
}

inline float statistic(const void* data, int64_t row) { return static_cast<const float*>(data)[row]; }

void norm_backward_row(const linear::NormBackwardArgs& args, int64_t n, int64_t row, float* sum_gamma,
                       float* sum_beta) {
  const Line x = row_of(args.x, row), grad_y = row_of(args.grad_y, row), residual = row_of(args.residual, row);
  const Line grad_x = row_of(args.grad_x, row), gamma = row_of(args.gamma, 0);
  const bool centred = args.norm == Norm::kLayerNorm;
  const F mean = broadcast(centred ? statistic(args.mean, row) : 0.0f);
  const float rstd_row = statistic(args.rstd, row);
  const F rstd = broadcast(rstd_row);
  const auto normed = [&](int64_t at, int count) { return (load_line(x, at, count) - mean) * rstd; };
  const auto grad_normed = [&](F grad, int64_t at, int count) {
    return gamma.data == nullptr ? grad : grad * load_line(gamma, at, count);
  };
  RowSum gradient, projection;  // sums of the gradient of what was normed, and of it times what was normed
  for_each_vector(n, [&](int64_t at, int count, int v) {
    const F grad = load_line(grad_y, at, count), value = first_lanes_of(normed(at, count), count);
    if (sum_gamma != nullptr) {
      store(sum_gamma + at, fma(grad, value, load(sum_gamma + at)));
      store(sum_beta + at, load(sum_beta + at) + grad);
    }
    const F inner = grad_normed(grad, at, count);
    gradient.sum[v] = gradient.sum[v] + inner;
    projection.sum[v] = fma(inner, value, projection.sum[v]);
  });
  if (grad_x.data == nullptr) return;
  const float size = static_cast<float>(n);
  const F mean_gradient = broadcast(centred ? gradient.total() / size : 0.0f);
  const F mean_projection = broadcast(projection.total() / size);
  for_each_vector(n, [&](int64_t at, int count, int) {
    const F inner = grad_normed(load_line(grad_y, at, count), at, count);
    F value = (inner - mean_gradient - normed(at, count) * mean_projection) * rstd;
    if (residual.data != nullptr) value = value + load_line(residual, at, count);
    if (args.accumulate_x) value = value + load_line(grad_x, at, count);
    store_line(grad_x, at, value, count);
  });
}

}  // namespace

void norm_forward_rows(const linear::NormForwardArgs& args, int64_t n, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; ++row) norm_row(args, n, row);
}

void norm_backward_rows(const linear::NormBackwardArgs& args, int64_t n, int64_t first, int64_t end, float* sums,
                        int64_t sums_stride) {
  float* sum_beta = sums == nullptr ? nullptr : sums + sums_stride;
  for (int64_t at = 0; sums != nullptr && at < n; at += kLanes) {
    store(sums + at, broadcast(0.0f));
    store(sum_beta + at, broadcast(0.0f));
  }
  for (int64_t row = first; row < end; ++row) norm_backward_row(args, n, row, sums, sum_beta);
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
