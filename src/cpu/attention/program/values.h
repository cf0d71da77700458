// One op of a program on rows of values.
#pragma once

#include "cpu/isa/elementary.h"
#include "cpu/isa/elements.h"
#include "cpu/isa/tile.h"
#include "program/code.h"
#include "program/integers.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// out[i] = f(a[i], b[i]). Rows are made of whole vectors; out may be a or b.
template <class R, class T, class Function>
inline void each(R* out, const T* a, const T* b, int lanes, const Function& f) {
#pragma GCC ivdep
  for (int l = 0; l < lanes; ++l) out[l] = static_cast<R>(f(a[l], b[l]));
}

// out = f(a), by vectors.
template <class Function>
inline void each_vector(float* out, const float* a, int lanes, const Function& f) {
  for (int l = 0; l < lanes; l += kLanes) store(out + l, f(load(a + l)));
}

inline float chained(float a, float b) { return a == 0 ? 0.0f : a * b; }

// By calls of the C library, one value after another.
inline void compute_slowly(Op op, float* out, const float* a, const float* b, int lanes) {
  for (int l = 0; l < lanes; ++l) {
    switch (op) {
      case Op::kLog: out[l] = __builtin_logf(a[l]); break;
      case Op::kErf: out[l] = __builtin_erff(a[l]); break;
      case Op::kSin: out[l] = __builtin_sinf(a[l]); break;
      case Op::kCos: out[l] = __builtin_cosf(a[l]); break;
      default: out[l] = __builtin_powf(a[l], b[l]); break;
    }
  }
}

inline void compute_row(Op op, float* out, const float* a, const float* b, int lanes) {
  const F one = broadcast(1.0f), log2e = broadcast(kLog2E);
  if (op == program::kChain) return each(out, a, b, lanes, chained);
  switch (op) {
    case Op::kAdd: return each(out, a, b, lanes, [](float x, float y) { return x + y; });
    case Op::kSub: return each(out, a, b, lanes, [](float x, float y) { return x - y; });
    case Op::kMul: return each(out, a, b, lanes, [](float x, float y) { return x * y; });
    case Op::kDiv: return each(out, a, b, lanes, [](float x, float y) { return x / y; });
    case Op::kNeg: return each(out, a, b, lanes, [](float x, float) { return -x; });
    case Op::kAbs: return each_vector(out, a, lanes, [](F x) { return absolute(x); });
    case Op::kMin: return each(out, a, b, lanes, [](float x, float y) { return x != x || x < y ? x : y; });
    case Op::kMax: return each(out, a, b, lanes, [](float x, float y) { return x != x || x > y ? x : y; });
    case Op::kFloor: return each(out, a, b, lanes, [](float x, float) { return __builtin_floorf(x); });
    case Op::kSqrt: return each(out, a, b, lanes, [](float x, float) { return __builtin_sqrtf(x); });
    case Op::kRsqrt: return each(out, a, b, lanes, [](float x, float) { return 1 / __builtin_sqrtf(x); });
    case Op::kExp: return each_vector(out, a, lanes, [&](F x) { return exp2(x, log2e); });
    case Op::kTanh: return each_vector(out, a, lanes, [](F x) { return tanh(x); });
    case Op::kSigmoid:
      return each_vector(out, a, lanes, [&](F x) { return one / (one + exp2(broadcast(0.0f) - x, log2e)); });
    default: return compute_slowly(op, out, a, b, lanes);
  }
}

// Comparisons, and the ints of floats.
template <class Int>
inline void compute_row(Op op, Int* out, const float* a, const float* b, int lanes) {
  switch (op) {
    case Op::kLess: return each(out, a, b, lanes, [](float x, float y) { return x < y; });
    case Op::kLessEqual: return each(out, a, b, lanes, [](float x, float y) { return x <= y; });
    case Op::kEqual: return each(out, a, b, lanes, [](float x, float y) { return x == y; });
    default: return each(out, a, b, lanes, [](float x, float) { return program::to_int<Int>(x); });
  }
}

// The floats of ints.
template <class Int>
inline void compute_row(Op, float* out, const Int* a, const Int* b, int lanes) {
  each(out, a, b, lanes, [](Int x, Int) { return static_cast<float>(x); });
}

template <class Int>
inline void compute_row(Op op, Int* out, const Int* a, const Int* b, int lanes) {
  switch (op) {
    case Op::kAdd: return each(out, a, b, lanes, [](Int x, Int y) { return program::add(x, y); });
    case Op::kSub: return each(out, a, b, lanes, [](Int x, Int y) { return program::subtract(x, y); });
    case Op::kMul: return each(out, a, b, lanes, [](Int x, Int y) { return program::multiply(x, y); });
    case Op::kNeg: return each(out, a, b, lanes, [](Int x, Int) { return program::subtract<Int>(0, x); });
    case Op::kAbs: return each(out, a, b, lanes, [](Int x, Int) { return x < 0 ? program::subtract<Int>(0, x) : x; });
    case Op::kMin: return each(out, a, b, lanes, [](Int x, Int y) { return x < y ? x : y; });
    case Op::kMax: return each(out, a, b, lanes, [](Int x, Int y) { return x > y ? x : y; });
    case Op::kFloorDiv: return each(out, a, b, lanes, [](Int x, Int y) { return program::floor_div(x, y); });
    case Op::kMod: return each(out, a, b, lanes, [](Int x, Int y) { return program::floor_mod(x, y); });
    case Op::kBitAnd:
    case Op::kAnd: return each(out, a, b, lanes, [](Int x, Int y) { return x & y; });
    case Op::kBitOr:
    case Op::kOr: return each(out, a, b, lanes, [](Int x, Int y) { return x | y; });
    case Op::kBitXor: return each(out, a, b, lanes, [](Int x, Int y) { return x ^ y; });
    case Op::kShiftLeft: return each(out, a, b, lanes, [](Int x, Int y) { return program::shift_left(x, y); });
    case Op::kShiftRight: return each(out, a, b, lanes, [](Int x, Int y) { return program::shift_right(x, y); });
    case Op::kLess: return each(out, a, b, lanes, [](Int x, Int y) { return x < y; });
    case Op::kLessEqual: return each(out, a, b, lanes, [](Int x, Int y) { return x <= y; });
    case Op::kEqual: return each(out, a, b, lanes, [](Int x, Int y) { return x == y; });
    case Op::kNot: return each(out, a, b, lanes, [](Int x, Int) { return 1 - x; });
    default: return;
  }
}

inline bool has_no_elements(const Tensor& t) {
  for (int n = 0; n < t.ndim; ++n) {
    if (t.dims[n] == 0) return true;
  }
  return false;
}

// The elements of a tensor at `offsets`; 0 of an empty one.
inline void load_floats(const Tensor& t, bool empty, const int64_t* offsets, float* out, int lanes) {
  for (int l = 0; l < lanes; ++l) {
    if (empty) {
      out[l] = 0;
    } else if (t.dtype == DType::kFloat32) {
      out[l] = static_cast<const float*>(t.data)[offsets[l]];
    } else if (t.dtype == DType::kFloat64) {
      out[l] = static_cast<float>(static_cast<const double*>(t.data)[offsets[l]]);
    }
  }
  if (empty || t.dtype == DType::kFloat32 || t.dtype == DType::kFloat64) return;
  uint16_t halves[kLanes];
  for (int l = 0; l < lanes; l += kLanes) {
    for (int i = 0; i < kLanes; ++i) halves[i] = static_cast<const uint16_t*>(t.data)[offsets[l + i]];
    store(out + l, load_halves(t.dtype, halves));
  }
}

template <class Int>
inline void load_integers(const Tensor& t, bool empty, const int64_t* offsets, Int* out, int lanes) {
  for (int l = 0; l < lanes; ++l) {
    if (empty) {
      out[l] = 0;
    } else if (t.dtype == DType::kBool) {
      out[l] = static_cast<const uint8_t*>(t.data)[offsets[l]] != 0;
    } else if (t.dtype == DType::kInt32) {
      out[l] = static_cast<const int32_t*>(t.data)[offsets[l]];
    } else {
      out[l] = static_cast<Int>(static_cast<const int64_t*>(t.data)[offsets[l]]);
    }
  }
}

inline void add_floats(float* to, const float* from, int lanes) {
  for (int l = 0; l < lanes; l += kLanes) store(to + l, load(to + l) + load(from + l));
}

// Of kTile floats.
inline float sum_of_floats(const float* x) {
  F sum = load(x);
  for (int v = 1; v < kVecs; ++v) sum = sum + load(x + v * kLanes);
  alignas(64) float lanes[kLanes];
  store(lanes, sum);
  float total = lanes[0];
  for (int l = 1; l < kLanes; ++l) total += lanes[l];
  return total;
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
