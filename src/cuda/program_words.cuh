// The ops of programs, by which a program's text is written (program_text.cc). Floats have no more operations than the
// text says, so that none is a sum of more digits than elsewhere; integers are program/integers.h's.
#pragma once

#include <cmath>

#include "cuda/numbers.cuh"
#include "program/integers.h"

namespace polyhead::cuda::words {

__device__ inline float add(float a, float b) { return a + b; }
__device__ inline float sub(float a, float b) { return a - b; }
__device__ inline float mul(float a, float b) { return a * b; }
__device__ inline float div(float a, float b) { return a / b; }
__device__ inline float neg(float a) { return -a; }
__device__ inline float abs(float a) { return fabsf(a); }
__device__ inline float min(float a, float b) { return a != a || a < b ? a : b; }  // NaN stays NaN
__device__ inline float max(float a, float b) { return a != a || a > b ? a : b; }
__device__ inline float floor(float a) { return floorf(a); }
__device__ inline float exp(float a) { return expf(a); }
__device__ inline float log(float a) { return logf(a); }
__device__ inline float tanh(float a) { return tanhf(a); }
__device__ inline float sigmoid(float a) { return 1 / (1 + expf(-a)); }
__device__ inline float erf(float a) { return erff(a); }
__device__ inline float sqrt(float a) { return sqrtf(a); }
__device__ inline float rsqrt(float a) { return 1 / sqrtf(a); }
__device__ inline float sin(float a) { return sinf(a); }
__device__ inline float cos(float a) { return cosf(a); }
__device__ inline float pow(float a, float b) { return powf(a, b); }
__device__ inline float chain(float a, float b) { return a == 0 ? 0 : a * b; }

template <class Int>
__device__ inline Int add(Int a, Int b) {
  return program::add(a, b);
}
template <class Int>
__device__ inline Int sub(Int a, Int b) {
  return program::subtract(a, b);
}
template <class Int>
__device__ inline Int mul(Int a, Int b) {
  return program::multiply(a, b);
}
template <class Int>
__device__ inline Int neg(Int a) {
  return program::subtract<Int>(0, a);
}
template <class Int>
__device__ inline Int abs(Int a) {
  return a < 0 ? program::subtract<Int>(0, a) : a;
}
template <class Int>
__device__ inline Int min(Int a, Int b) {
  return a < b ? a : b;
}
template <class Int>
__device__ inline Int max(Int a, Int b) {
  return a > b ? a : b;
}

// An index that may lie outside of its dim, of `size`.
__device__ inline int64_t within(int64_t index, int64_t size) {
  return index < 0 ? 0 : index < size ? index : size - 1;
}

template <class T>
__device__ inline auto load(const Captured& x, int64_t n) {
  return static_cast<const T*>(x.data)[n];
}
template <>
__device__ inline auto load<BFloat16>(const Captured& x, int64_t n) {
  return to_float(static_cast<const BFloat16*>(x.data)[n]);
}
template <>
__device__ inline auto load<Float16>(const Captured& x, int64_t n) {
  return to_float(static_cast<const Float16*>(x.data)[n]);
}

}  // namespace polyhead::cuda::words
