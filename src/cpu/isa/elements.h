// Vectors of elements of any dtype that kernels take, at any distance: nothing else asks what dtype numbers have.
#pragma once

#include "cpu/isa/operand.h"
#include "cpu/isa/tile.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

inline const float* f32(const void* data) { return static_cast<const float*>(data); }
inline const uint16_t* u16(const void* data) { return static_cast<const uint16_t*>(data); }

// kLanes neighbours of 16 bits, as floats. Any other dtype gives NaN, and is not stored: no number is taken for another.
inline F load_halves(DType dtype, const uint16_t* p) {
  if (dtype == DType::kBFloat16) return load_bf16(p);
  if (dtype == DType::kFloat16) return load_f16(p);
  return broadcast(__builtin_nanf(""));
}

inline void store_halves(DType dtype, uint16_t* p, F x) {
  if (dtype == DType::kBFloat16) {
    store_bf16(p, x);
  } else if (dtype == DType::kFloat16) {
    store_f16(p, x);
  }
}

// n <= kLanes elements from element `at` on, `stride` apart, as floats; the lanes behind them are 0.
inline F load_elements(const void* data, DType dtype, int64_t at, int64_t stride, int n) {
  if (dtype == DType::kFloat32) {
    if (stride == 1) return n == kLanes ? load(f32(data) + at) : load_first(f32(data) + at, n);
    alignas(64) float buffer[kLanes] = {};
    for (int i = 0; i < n; ++i) buffer[i] = f32(data)[at + i * stride];
    return load(buffer);
  }
  alignas(32) uint16_t buffer[kLanes] = {};
  const uint16_t* source = u16(data) + at;
  if (n < kLanes || stride != 1) {
    for (int i = 0; i < n; ++i) buffer[i] = source[i * stride];
    source = buffer;
  }
  return load_halves(dtype, source);
}

// The other way, rounded to nearest even.
inline void store_elements(void* data, DType dtype, int64_t at, int64_t stride, F x, int n) {
  if (dtype == DType::kFloat32 && stride == 1) {
    store_first(static_cast<float*>(data) + at, x, n);
    return;
  }
  if (dtype == DType::kFloat32) {
    alignas(64) float buffer[kLanes];
    store(buffer, x);
    for (int i = 0; i < n; ++i) static_cast<float*>(data)[at + i * stride] = buffer[i];
    return;
  }
  alignas(32) uint16_t buffer[kLanes];
  uint16_t* target = static_cast<uint16_t*>(data) + at;
  uint16_t* whole = n == kLanes && stride == 1 ? target : buffer;
  store_halves(dtype, whole, x);
  if (whole == buffer) {
    for (int i = 0; i < n; ++i) target[i * stride] = buffer[i];
  }
}

// The same, added to what is there if `accumulate`.
inline void store_sum(void* data, DType dtype, int64_t at, int64_t stride, F x, int n, bool accumulate) {
  if (accumulate) x = x + load_elements(data, dtype, at, stride, n);
  store_elements(data, dtype, at, stride, x, n);
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
