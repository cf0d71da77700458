// What a program means: every step of one (query, key) pair, and its derivatives, in plain loops.
//
// Gradients: abs'(0) = 0; min and max give half to each of two equal operands; integers, comparisons and floor give none;
// a select gives to the operand that it took. A gradient of exactly 0 stays 0 whatever it is multiplied by, so that no
// infinite slope of a value that was not used becomes NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "polyhead/attention.h"
#include "polyhead/program.h"

namespace polyhead::reference {

template <class T>
struct Value {
  T number = 0;         // of a float
  int64_t integer = 0;  // of an int; of a bool 0 or 1
};

// Where a program is asked.
struct PairPlace {
  int64_t b, h, q, k, offset;
};

inline int64_t wrapped(uint64_t x) { return static_cast<int64_t>(x); }
inline uint64_t word(int64_t x) { return static_cast<uint64_t>(x); }

inline int64_t floor_div(int64_t a, int64_t b) {
  if (b == 0) return 0;
  if (b == -1) return wrapped(0 - word(a));
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

inline int64_t shift_left(int64_t a, int64_t by) { return wrapped(word(a) << std::clamp<int64_t>(by, 0, 63)); }
inline int64_t shift_right(int64_t a, int64_t by) { return a >> std::clamp<int64_t>(by, 0, 63); }

template <class T>
int64_t to_int(T x) {
  if (x != x) return 0;
  if (x >= static_cast<T>(0x1p63)) return INT64_MAX;
  return x < static_cast<T>(-0x1p63) ? INT64_MIN : static_cast<int64_t>(x);
}

template <class T>
class ProgramAt {
 public:
  // `values` and `adjoints` have an element for each step.
  ProgramAt(const Program& program, std::span<const Tensor> captures, Value<T>* values, T* adjoints)
      : program_(program), captures_(captures), values_(values), adjoints_(adjoints) {}

  bool has_score() const { return program_.score() >= 0; }
  T score() const { return values_[program_.score()].number; }
  bool visible() const { return program_.mask() < 0 || values_[program_.mask()].integer != 0; }

  // All steps up to `last`: a mask's steps come before what only the score needs.
  void evaluate(const PairPlace& at, T score, int last) const {
    for (int i = 0; i <= last; ++i) values_[i] = evaluate(program_.steps()[static_cast<size_t>(i)], at, score);
  }
  void evaluate(const PairPlace& at, T score) const {
    evaluate(at, score, static_cast<int>(program_.steps().size()) - 1);
  }
  bool visible(const PairPlace& at) const {
    if (program_.mask() >= 0) evaluate(at, T(0), program_.mask());
    return visible();
  }

  // Of the steps that evaluate() computed, from the gradient of the score; gives that of the score it was given.
  T differentiate(T gradient) const {
    if (!has_score()) return gradient;
    const auto num_steps = static_cast<int>(program_.steps().size());
    std::fill_n(adjoints_, num_steps, T(0));
    adjoints_[program_.score()] = gradient;
    T of_score = 0;
    for (int i = program_.score(); i >= 0; --i) {
      const ProgramStep& step = program_.steps()[static_cast<size_t>(i)];
      if (step.op == Op::kScore) of_score = adjoints_[i];
      if (step.type == ValueType::kFloat && adjoints_[i] != T(0)) pass_on(step, values_[i].number, adjoints_[i]);
    }
    return of_score;
  }

  // Calls add(at, gradient) for each element of `capture` that was read: `at` counts its elements in row-major order.
  template <class Add>
  void for_each_gradient(int capture, const Add& add) const {
    for (size_t i = 0; i < program_.steps().size(); ++i) {
      const ProgramStep& step = program_.steps()[i];
      if (step.op != Op::kGather || step.capture != capture || adjoints_[i] == T(0)) continue;
      const Tensor& t = captures_[static_cast<size_t>(capture)];
      int64_t at = 0;
      for (int n = 0; n < step.num_operands(); ++n) at = at * t.dims[n] + index(step, n);
      add(at, adjoints_[i]);
    }
  }

 private:
  T number(const ProgramStep& step, int operand) const { return values_[step.operands[operand]].number; }
  int64_t integer(const ProgramStep& step, int operand) const { return values_[step.operands[operand]].integer; }
  bool is_float(const ProgramStep& step, int operand) const {
    return program_.steps()[static_cast<size_t>(step.operands[operand])].type == ValueType::kFloat;
  }
  // Within the tensor: of what no visible pair uses, any element will do.
  int64_t index(const ProgramStep& step, int n) const {
    const int64_t size = captures_[static_cast<size_t>(step.capture)].dims[n];
    return std::clamp<int64_t>(integer(step, n), 0, std::max<int64_t>(size - 1, 0));
  }

  Value<T> gather(const ProgramStep& step) const {
    const Tensor& t = captures_[static_cast<size_t>(step.capture)];
    if (t.num_elements() == 0) return {};
    int64_t at = 0;
    for (int n = 0; n < step.num_operands(); ++n) at += index(step, n) * t.strides[n];
    switch (t.dtype) {
      case DType::kBool: return {T(0), static_cast<const uint8_t*>(t.data)[at] != 0};
      case DType::kInt32: return {T(0), static_cast<const int32_t*>(t.data)[at]};
      case DType::kInt64: return {T(0), static_cast<const int64_t*>(t.data)[at]};
      default: return {static_cast<T>(load_element(t.data, t.dtype, at)), 0};
    }
  }

  Value<T> evaluate(const ProgramStep& s, const PairPlace& at, T score) const {
    switch (s.op) {
      case Op::kScore: return {score, 0};
      case Op::kBatch: return {T(0), at.b};
      case Op::kHead: return {T(0), at.h};
      case Op::kQuery: return {T(0), at.q};
      case Op::kKey: return {T(0), at.k};
      case Op::kOffset: return {T(0), at.offset};
      case Op::kConstant: return {static_cast<T>(s.number), s.integer};
      case Op::kGather: return gather(s);
      case Op::kSelect: return values_[s.operands[integer(s, 0) != 0 ? 1 : 2]];
      case Op::kToFloat: return {static_cast<T>(integer(s, 0)), 0};
      case Op::kToInt: return {T(0), to_int(number(s, 0))};
      case Op::kAnd: return {T(0), integer(s, 0) & integer(s, 1)};
      case Op::kOr: return {T(0), integer(s, 0) | integer(s, 1)};
      case Op::kNot: return {T(0), 1 - integer(s, 0)};
      default: break;
    }
    if (is_float(s, 0)) return of_floats(s, number(s, 0), s.operands[1] >= 0 ? number(s, 1) : T(0));
    return {T(0), of_ints(s, integer(s, 0), s.operands[1] >= 0 ? integer(s, 1) : 0)};
  }

  static Value<T> of_floats(const ProgramStep& s, T a, T b) {
    switch (s.op) {
      case Op::kAdd: return {a + b, 0};
      case Op::kSub: return {a - b, 0};
      case Op::kMul: return {a * b, 0};
      case Op::kDiv: return {a / b, 0};
      case Op::kNeg: return {-a, 0};
      case Op::kAbs: return {std::abs(a), 0};
      case Op::kMin: return {a != a || a < b ? a : b, 0};  // NaN stays NaN
      case Op::kMax: return {a != a || a > b ? a : b, 0};
      case Op::kFloor: return {std::floor(a), 0};
      case Op::kExp: return {std::exp(a), 0};
      case Op::kLog: return {std::log(a), 0};
      case Op::kTanh: return {std::tanh(a), 0};
      case Op::kSigmoid: return {1 / (1 + std::exp(-a)), 0};
      case Op::kErf: return {std::erf(a), 0};
      case Op::kSqrt: return {std::sqrt(a), 0};
      case Op::kRsqrt: return {1 / std::sqrt(a), 0};
      case Op::kSin: return {std::sin(a), 0};
      case Op::kCos: return {std::cos(a), 0};
      case Op::kPow: return {std::pow(a, b), 0};
      case Op::kLess: return {T(0), a < b};
      case Op::kLessEqual: return {T(0), a <= b};
      case Op::kEqual: return {T(0), a == b};
      default: return {};
    }
  }

  static int64_t of_ints(const ProgramStep& s, int64_t a, int64_t b) {
    switch (s.op) {
      case Op::kAdd: return wrapped(word(a) + word(b));
      case Op::kSub: return wrapped(word(a) - word(b));
      case Op::kMul: return wrapped(word(a) * word(b));
      case Op::kNeg: return wrapped(0 - word(a));
      case Op::kAbs: return a < 0 ? wrapped(0 - word(a)) : a;
      case Op::kMin: return std::min(a, b);
      case Op::kMax: return std::max(a, b);
      case Op::kFloorDiv: return floor_div(a, b);
      case Op::kMod: return b == 0 ? 0 : wrapped(word(a) - word(floor_div(a, b)) * word(b));
      case Op::kBitAnd: return a & b;
      case Op::kBitOr: return a | b;
      case Op::kBitXor: return a ^ b;
      case Op::kShiftLeft: return shift_left(a, b);
      case Op::kShiftRight: return shift_right(a, b);
      case Op::kLess: return a < b;
      case Op::kLessEqual: return a <= b;
      case Op::kEqual: return a == b;
      default: return 0;
    }
  }

  void add(const ProgramStep& step, int operand, T gradient) const { adjoints_[step.operands[operand]] += gradient; }

  // g: the gradient of the value y, which is not 0.
  void pass_on(const ProgramStep& s, T y, T g) const {
    if (s.op == Op::kSelect) return add(s, integer(s, 0) != 0 ? 1 : 2, g);
    if (s.num_operands() == 0 || !is_float(s, 0)) return;
    const T a = number(s, 0), b = s.operands[1] >= 0 ? number(s, 1) : T(0);
    switch (s.op) {
      case Op::kAdd: add(s, 0, g), add(s, 1, g); break;
      case Op::kSub: add(s, 0, g), add(s, 1, -g); break;
      case Op::kMul: add(s, 0, g * b), add(s, 1, g * a); break;
      case Op::kDiv: add(s, 0, g / b), add(s, 1, -g * y / b); break;
      case Op::kNeg: add(s, 0, -g); break;
      case Op::kAbs: add(s, 0, a > 0 ? g : a < 0 ? -g : T(0)); break;
      case Op::kMin:
      case Op::kMax:
        add(s, 0, a == b ? g / 2 : y == a ? g : T(0)), add(s, 1, a == b ? g / 2 : y == b ? g : T(0));
        break;
      case Op::kExp: add(s, 0, g * y); break;
      case Op::kLog: add(s, 0, g / a); break;
      case Op::kTanh: add(s, 0, g * (1 - y * y)); break;
      case Op::kSigmoid: add(s, 0, g * y * (1 - y)); break;
      case Op::kErf: add(s, 0, g * static_cast<T>(1.12837916709551257390) * std::exp(-a * a)); break;
      case Op::kSqrt: add(s, 0, g / (2 * y)); break;
      case Op::kRsqrt: add(s, 0, -g * y / (2 * a)); break;
      case Op::kSin: add(s, 0, g * std::cos(a)); break;
      case Op::kCos: add(s, 0, -g * std::sin(a)); break;
      case Op::kPow:
        add(s, 0, b == 0 ? T(0) : g * b * std::pow(a, b - 1)), add(s, 1, y == 0 ? T(0) : g * y * std::log(a));
        break;
      default: break;
    }
  }

  const Program& program_;
  std::span<const Tensor> captures_;
  Value<T>* values_;
  T* adjoints_;
};

}  // namespace polyhead::reference
