// Eight neighbouring elements of a row of a matrix, as floats in registers: those from a column that is a multiple of 8 on.
// Of the last ones of a row some may not be there.
#pragma once

#include "cuda/linear_problem.h"
#include "cuda/numbers.cuh"

namespace polyhead::cuda {

constexpr int kEight = 8;
using Eight = float[kEight];

// Of index i from index 0, in elements.
__device__ inline int64_t offset_of(const Steps& steps, int i) {
  if (steps.plain) return i * steps.strides[2];
  const unsigned n = static_cast<unsigned>(i), outer = n / steps.inner;
  return outer / steps.middle * steps.strides[0] + outer % steps.middle * steps.strides[1] +
         n % steps.inner * steps.strides[2];
}

__device__ inline float load_one(const View& x, int64_t at) {
  if (x.number == Number::kFloat32) return static_cast<const float*>(x.data)[at];
  const BFloat16 bits = static_cast<const BFloat16*>(x.data)[at];
  return x.number == Number::kBFloat16 ? to_float(bits) : to_float(Float16{bits.bits});
}

__device__ inline unsigned rounded_pair(Number number, float low, float high) {
  return number == Number::kBFloat16 ? packed<BFloat16>(low, high) : packed<Float16>(low, high);
}

__device__ inline void store_one(const View& x, int64_t at, float value) {
  if (x.number == Number::kFloat32) {
    static_cast<float*>(x.data)[at] = value;
  } else {
    static_cast<BFloat16*>(x.data)[at].bits = static_cast<uint16_t>(rounded_pair(x.number, value, 0));
  }
}

// x as one of the floats beside it, of which the last bit tells that it is not exact: what is rounded to 16 bits next is
// rounded as x would be.
__device__ inline float rounded_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const unsigned bits = __float_as_uint(nearest);
  if (static_cast<double>(nearest) == x || (bits & 1) != 0 || x != x) return nearest;
  return __uint_as_float(fabs(x) > fabs(static_cast<double>(nearest)) ? bits + 1 : bits - 1);
}

// x as a store leaves it.
__device__ inline float rounded_as(Number number, float x) {
  if (number == Number::kFloat32) return x;
  return number == Number::kBFloat16 ? to_float(rounded<BFloat16>(x)) : to_float(rounded<Float16>(x));
}

// x[1 .. 7] become x[0 .. 6]. A loop over eight elements that takes the first and puts it back as the last has code for
// one, and registers need no index.
__device__ inline void append(Eight& x, float last) {
#pragma unroll
  for (int i = 0; i + 1 < kEight; ++i) x[i] = x[i + 1];
  x[kEight - 1] = last;
}

// Each element becomes function(element, i).
template <class Function>
__device__ inline void for_each_of(Eight& x, const Function& function) {
#pragma unroll 1
  for (int i = 0; i < kEight; ++i) append(x, function(x[0], i));
}

// A row of a matrix.
struct RowOf {
  const View& view;
  int64_t first;

  __device__ RowOf(const View& x, int row) : view(x), first(offset_of(x.rows, row)) {}

  // Columns [column, column + count) and zeros.
  __device__ void load(Eight& x, int column, int count) const {
    if (!view.in_pieces || count < kEight) {
#pragma unroll
      for (int i = 0; i < kEight; ++i) x[i] = 0;
      for_each_of(
          x, [&](float, int i) { return i < count ? load_one(view, first + offset_of(view.columns, column + i)) : 0; });
      return;
    }
    const int64_t at = first + offset_of(view.columns, column);
    if (view.number == Number::kFloat32) {
      const auto* four = reinterpret_cast<const float4*>(static_cast<const float*>(view.data) + at);
      const float4 low = four[0], high = four[1];
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
      x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
      return;
    }
    const uint4 words = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(view.data) + at);
    const unsigned pairs[4] = {words.x, words.y, words.z, words.w};
    const bool brain = view.number == Number::kBFloat16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = brain ? low_half<BFloat16>(pairs[i]) : low_half<Float16>(pairs[i]);
      x[2 * i + 1] = brain ? high_half<BFloat16>(pairs[i]) : high_half<Float16>(pairs[i]);
    }
  }

  __device__ void store(const Eight& x, int column, int count) const {
    if (!view.in_pieces || count < kEight) {
      Eight left;
#pragma unroll
      for (int i = 0; i < kEight; ++i) left[i] = x[i];
      for_each_of(left, [&](float value, int i) {
        if (i < count) store_one(view, first + offset_of(view.columns, column + i), value);
        return value;
      });
      return;
    }
    const int64_t at = first + offset_of(view.columns, column);
    if (view.number == Number::kFloat32) {
      auto* four = reinterpret_cast<float4*>(static_cast<float*>(view.data) + at);
      four[0] = {x[0], x[1], x[2], x[3]};
      four[1] = {x[4], x[5], x[6], x[7]};
      return;
    }
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = rounded_pair(view.number, x[2 * i], x[2 * i + 1]);
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(view.data) + at) = {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
};

__device__ inline int count_from(int column, int columns) {
  return columns - column < kEight ? columns - column : kEight;
}

}  // namespace polyhead::cuda
