// One op of a program on rows of values.
#pragma once

#include "cpu/isa/elementary.h"
#include "cpu/isa/elements.h"
#include "cpu/isa/tile.h"
#include "program/code.h"
#include "program/integers.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Rows of lanes of an operand, `step` elements from one to the next; or one number a row.
template <class T>
struct ValueRows {
  const T* first;
  int step;
  bool one_number;
};

// f(l) for each of `count` lanes, of which none reads what another writes.
template <class Function>
inline __attribute__((always_inline)) void each_lane(int count, const Function& f) {
#ifdef __clang__
#pragma clang diagnostic ignored "-Wpass-failed"  // f may call the C library
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (int l = 0; l < count; ++l) f(l);
}

constexpr int kSpan = 16;  // rows are whole spans of lanes: all vectors and memory of low rates are

// out[row][lane] = f(a, b), of which one number a row is b, or else a, at most. out may be a or b.
template <class R, class T, class Function>
inline void each(R* out, ValueRows<T> a, ValueRows<T> b, int rows, int lanes, const Function& f) {
  const int count = lanes & -kSpan;
  for (; rows > 0; --rows, out += lanes, a.first += a.step, b.first += b.step) {
    const T *const x = a.first, *const y = b.first;
    if (b.one_number) {
      const T number = *y;
      each_lane(count, [&](int l) { out[l] = static_cast<R>(f(x[l], number)); });
    } else if (a.one_number) {
      const T number = *x;
      each_lane(count, [&](int l) { out[l] = static_cast<R>(f(number, y[l])); });
    } else {
      each_lane(count, [&](int l) { out[l] = static_cast<R>(f(x[l], y[l])); });
    }
  }
}

// out = f(a), by vectors.
template <class Function>
inline void each_vector(float* out, const ValueRows<float>& a, int rows, int lanes, const Function& f) {
  for (int r = 0; r < rows; ++r, out += lanes) {
    for (int l = 0; l < lanes; l += kLanes) store(out + l, f(load(a.first + r * a.step + l)));
  }
}

// out = a where the condition holds, else b.
template <class T, class Int>
inline void select_rows(T* out, ValueRows<Int> condition, ValueRows<T> a, ValueRows<T> b, int rows, int lanes) {
  const int count = lanes & -kSpan;
  for (; rows > 0; --rows, out += lanes, condition.first += condition.step, a.first += a.step, b.first += b.step) {
    const T *const x = a.first, *const y = b.first;
    if (condition.one_number) {
      const ValueRows<T>& chosen = *condition.first != 0 ? a : b;
      for (int l = 0; l < lanes; ++l) out[l] = chosen.first[chosen.one_number ? 0 : l];
      continue;
    }
    const Int* const c = condition.first;
    if (a.one_number && b.one_number) {
      const T number = *x, other = *y;
      each_lane(count, [&](int l) { out[l] = c[l] != 0 ? number : other; });
    } else if (a.one_number) {
      const T number = *x;
      each_lane(count, [&](int l) { out[l] = c[l] != 0 ? number : y[l]; });
    } else if (b.one_number) {
      const T number = *y;
      each_lane(count, [&](int l) { out[l] = c[l] != 0 ? x[l] : number; });
    } else {
      each_lane(count, [&](int l) { out[l] = c[l] != 0 ? x[l] : y[l]; });
    }
  }
}

inline float chained(float a, float b) { return a == 0 ? 0.0f : a * b; }

// By calls of the C library, one value after another.
inline void compute_slowly(Op op, float* out, const ValueRows<float>& a, const ValueRows<float>& b, int rows,
                           int lanes) {
  each(out, a, b, rows, lanes, [op](float x, float y) {
    switch (op) {
      case Op::kLog: return __builtin_logf(x);
      case Op::kErf: return __builtin_erff(x);
      case Op::kSin: return __builtin_sinf(x);
      case Op::kCos: return __builtin_cosf(x);
      default: return __builtin_powf(x, y);
    }
  });
}

inline void compute_rows(Op op, float* out, const ValueRows<float>& a, const ValueRows<float>& b, int rows, int lanes) {
  const F one = broadcast(1.0f);
  if (op == program::kChain) return each(out, a, b, rows, lanes, chained);
  switch (op) {
    case Op::kAdd: return each(out, a, b, rows, lanes, [](float x, float y) { return x + y; });
    case Op::kSub: return each(out, a, b, rows, lanes, [](float x, float y) { return x - y; });
    case Op::kMul: return each(out, a, b, rows, lanes, [](float x, float y) { return x * y; });
    case Op::kDiv: return each(out, a, b, rows, lanes, [](float x, float y) { return x / y; });
    case Op::kNeg: return each(out, a, b, rows, lanes, [](float x, float) { return -x; });
    case Op::kAbs: return each_vector(out, a, rows, lanes, [](F x) { return absolute(x); });
    case Op::kMin: return each(out, a, b, rows, lanes, [](float x, float y) { return x != x || x < y ? x : y; });
    case Op::kMax: return each(out, a, b, rows, lanes, [](float x, float y) { return x != x || x > y ? x : y; });
    case Op::kFloor: return each(out, a, b, rows, lanes, [](float x, float) { return __builtin_floorf(x); });
    case Op::kSqrt: return each(out, a, b, rows, lanes, [](float x, float) { return __builtin_sqrtf(x); });
    case Op::kRsqrt: return each(out, a, b, rows, lanes, [](float x, float) { return 1 / __builtin_sqrtf(x); });
    case Op::kExp: return each_vector(out, a, rows, lanes, [](F x) { return exp(x); });
    case Op::kTanh: return each_vector(out, a, rows, lanes, [](F x) { return tanh(x); });
    case Op::kSigmoid:
      return each_vector(out, a, rows, lanes, [&](F x) { return one / (one + exp(broadcast(0.0f) - x)); });
    default: return compute_slowly(op, out, a, b, rows, lanes);
  }
}

// Comparisons, and the ints of floats.
template <class Int>
inline void compute_rows(Op op, Int* out, const ValueRows<float>& a, const ValueRows<float>& b, int rows, int lanes) {
  switch (op) {
    case Op::kLess: return each(out, a, b, rows, lanes, [](float x, float y) { return x < y; });
    case Op::kLessEqual: return each(out, a, b, rows, lanes, [](float x, float y) { return x <= y; });
    case Op::kEqual: return each(out, a, b, rows, lanes, [](float x, float y) { return x == y; });
    default: return each(out, a, b, rows, lanes, [](float x, float) { return program::to_int<Int>(x); });
  }
}

// The floats of ints.
template <class Int>
inline void compute_rows(Op, float* out, const ValueRows<Int>& a, const ValueRows<Int>& b, int rows, int lanes) {
  each(out, a, b, rows, lanes, [](Int x, Int) { return static_cast<float>(x); });
}

template <class Int>
inline void compute_rows(Op op, Int* out, const ValueRows<Int>& a, const ValueRows<Int>& b, int rows, int lanes) {
  switch (op) {
    case Op::kAdd: return each(out, a, b, rows, lanes, [](Int x, Int y) { return program::add(x, y); });
    case Op::kSub: return each(out, a, b, rows, lanes, [](Int x, Int y) { return program::subtract(x, y); });
    case Op::kMul: return each(out, a, b, rows, lanes, [](Int x, Int y) { return program::multiply(x, y); });
    case Op::kNeg: return each(out, a, b, rows, lanes, [](Int x, Int) { return program::subtract<Int>(0, x); });
    case Op::kAbs:
      return each(out, a, b, rows, lanes, [](Int x, Int) { return x < 0 ? program::subtract<Int>(0, x) : x; });
    case Op::kMin: return each(out, a, b, rows, lanes, [](Int x, Int y) { return x < y ? x : y; });
    case Op::kMax: return each(out, a, b, rows, lanes, [](Int x, Int y) { return x > y ? x : y; });
    case Op::kFloorDiv: return each(out, a, b, rows, lanes, [](Int x, Int y) { return program::floor_div(x, y); });
    case Op::kMod: return each(out, a, b, rows, lanes, [](Int x, Int y) { return program::floor_mod(x, y); });
    case Op::kBitAnd:
    case Op::kAnd: return each(out, a, b, rows, lanes, [](Int x, Int y) { return x & y; });
    case Op::kBitOr:
    case Op::kOr: return each(out, a, b, rows, lanes, [](Int x, Int y) { return x | y; });
    case Op::kBitXor: return each(out, a, b, rows, lanes, [](Int x, Int y) { return x ^ y; });
    case Op::kShiftLeft: return each(out, a, b, rows, lanes, [](Int x, Int y) { return program::shift_left(x, y); });
    case Op::kShiftRight: return each(out, a, b, rows, lanes, [](Int x, Int y) { return program::shift_right(x, y); });
    case Op::kLess: return each(out, a, b, rows, lanes, [](Int x, Int y) { return x < y; });
    case Op::kLessEqual: return each(out, a, b, rows, lanes, [](Int x, Int y) { return x <= y; });
    case Op::kEqual: return each(out, a, b, rows, lanes, [](Int x, Int y) { return x == y; });
    case Op::kNot: return each(out, a, b, rows, lanes, [](Int x, Int) { return 1 - x; });
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

// sums[lane] += the rows of kTile floats.
inline void add_columns(float* sums, const float* x, int rows) {
  for (int l = 0; l < kTile; l += kLanes) {
    F sum = load(x + l);
    for (int r = 1; r < rows; ++r) sum = sum + load(x + r * kTile + l);
    store(sums + l, load(sums + l) + sum);
  }
}

// sums[row] += the lanes of a row.
inline void add_rows(float* sums, const float* x, int rows) {
  for (int first = 0; first < rows; first += kLanes) {
    F row[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      row[r] = broadcast(0.0f);
      for (int l = 0; first + r < rows && l < kTile; l += kLanes) row[r] = row[r] + load(x + (first + r) * kTile + l);
    }
    transpose(row);
    for (int r = 1; r < kLanes; ++r) row[0] = row[0] + row[r];
    alignas(64) float sum[kLanes];
    store(sum, row[0]);
    for (int r = 0; r < kLanes && first + r < rows; ++r) sums[first + r] += sum[r];
  }
}

// sums[lane - row + rows - 1] += x[row][lane]: by places of the sum, whose vectors lie across the rows. What is loaded beside
// a row is the row before or behind; before the first row, memory that a machine has there.
inline void add_diagonals(float* sums, const float* x, int rows) {
  for (int at = 0; at < kTile + rows - 1; at += kLanes) {
    F sum = broadcast(0.0f);
    for (int r = 0; r < rows; ++r) {
      const int lane = at + r - (rows - 1);  // of the row, for the first place of the vector
      if (lane >= kTile || lane <= -kLanes) continue;
      F row = load(x + r * kTile + lane);
      if (lane < 0) row = select(mask_from_bits(~0u << -lane), row, broadcast(0.0f));
      if (lane > kTile - kLanes) row = select(mask_from_bits((1u << (kTile - lane)) - 1), row, broadcast(0.0f));
      sum = sum + row;
    }
    store(sums + at, load(sums + at) + sum);
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
