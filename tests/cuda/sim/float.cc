// Floating-point instructions and comparisons: PTX ISA 9.0, "Floating-Point", "Half Precision Floating-Point",
// "Comparison and Selection". Approximations give the correctly rounded result, or one within an ulp of it: that lies
// within their documented errors, but is not what a GPU's own table gives.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/dtype.h"
#include "opcodes.h"
#include "warp.h"

namespace cuda_sim {
namespace {

using polyhead::BFloat16;
using polyhead::Float16;

// .ftz: a subnormal operand or result is 0 with its sign.
template <bool kFlush, class T>
T flushed(T x) {
  return kFlush && std::fabs(x) < std::numeric_limits<T>::min() ? std::copysign(T{0}, x) : x;
}

double value_of(Float16 x) { return to_float(x); }
double value_of(BFloat16 x) { return to_float(x); }

template <class T>
T rounded(double x) {
  if constexpr (std::is_same_v<T, Float16>) return polyhead::to_float16(polyhead::to_float_for_rounding(x));
  if constexpr (std::is_same_v<T, BFloat16>) return polyhead::to_bfloat16(polyhead::to_float_for_rounding(x));
}

struct Add {
  template <class T>
  static T of(T a, T b) {
    return a + b;
  }
};
struct Sub {
  template <class T>
  static T of(T a, T b) {
    return a - b;
  }
};
struct Mul {
  template <class T>
  static T of(T a, T b) {
    return a * b;
  }
};
struct Div {
  template <class T>
  static T of(T a, T b) {
    return a / b;
  }
};
// a + b - sum, where `sum` is a + b rounded (Knuth's two-sum).
double lost(double a, double b, double sum) {
  const double part = sum - a;
  return (a - (sum - part)) + (b - part);
}

struct FmaDown {  // of floats, rounded down
  static float of(float a, float b, float c) {
    const float nearest = std::fma(a, b, c);
    const double product = static_cast<double>(a) * b, sum = product + c, error = lost(product, c, sum);
    const bool above = nearest > sum || (nearest == sum && error < 0);
    return above ? std::nextafter(nearest, -HUGE_VALF) : nearest;
  }
};
struct Min {  // of a number and a NaN: the number; -0 < +0
  template <class T>
  static T of(T a, T b) {
    return a != a ? b : b != b ? a : a < b || (a == b && std::signbit(a)) ? a : b;
  }
};
struct Max {
  template <class T>
  static T of(T a, T b) {
    return a != a ? b : b != b ? a : a > b || (a == b && !std::signbit(a)) ? a : b;
  }
};
const float kCanonicalNan = std::bit_cast<float>(0x7fffffffu);
struct MinNan {
  static float of(float a, float b) { return a != a || b != b ? kCanonicalNan : Min::of(a, b); }
};
struct MaxNan {
  static float of(float a, float b) { return a != a || b != b ? kCanonicalNan : Max::of(a, b); }
};
struct CopySign {  // of a, on b
  template <class T>
  static T of(T a, T b) {
    return std::copysign(b, a);
  }
};
struct Fma {
  template <class T>
  static T of(T a, T b, T c) {
    return std::fma(a, b, c);
  }
};
struct FmaOdd {  // of halves; rounds on to a half as the exact sum would (round to odd: Boldo, Melquiond 2005)
  static double of(double a, double b, double c) {
    const double product = a * b, sum = product + c, error = lost(product, c, sum);
    if (error == 0 || !std::isfinite(sum)) return sum;
    const auto bits = std::bit_cast<uint64_t>(sum);
    return std::bit_cast<double>(((error < 0) == (sum < 0) ? bits : bits - 1) | 1);
  }
};
struct Abs {
  static double of(double a) { return std::fabs(a); }
};
struct Neg {
  static double of(double a) { return -a; }
};
struct Reciprocal {
  static double of(double a) { return 1 / a; }
};
struct Sqrt {
  static double of(double a) { return std::sqrt(a); }
};
struct ReciprocalSqrt {
  static double of(double a) { return 1 / std::sqrt(a); }
};
struct Exp2 {  // rounded towards zero, since an H100's results are too small by half an ulp on average; but to infinity
  static double of(double a) {
    const double exact = std::exp2(a);
    const auto nearest = static_cast<float>(exact);
    const bool above = std::isfinite(nearest) && static_cast<double>(nearest) > exact;
    return static_cast<double>(above ? std::nextafter(nearest, 0.0f) : nearest);
  }
};
struct Log2 {
  static double of(double a) { return std::log2(a); }
};
struct Sine {
  static double of(double a) { return std::sin(a); }
};
struct Cosine {
  static double of(double a) { return std::cos(a); }
};
struct Tanh {
  static double of(double a) { return std::tanh(a); }
};

template <class T, class Op, bool kFlush>
void unary(Warp& w, const Instruction& i, uint32_t mask) {  // computed in float64 and rounded once
  map_lanes<T, T>(w, i, mask, [](T a) { return flushed<kFlush>(static_cast<T>(Op::of(flushed<kFlush>(a)))); });
}

template <class T, class Op, bool kFlush>
void binary(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<T, T, T>(w, i, mask,
                     [](T a, T b) { return flushed<kFlush>(Op::of(flushed<kFlush>(a), flushed<kFlush>(b))); });
}

template <class T, class Op, bool kFlush>
void ternary(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<T, T, T, T>(w, i, mask, [](T a, T b, T c) {
    return flushed<kFlush>(Op::of(flushed<kFlush>(a), flushed<kFlush>(b), flushed<kFlush>(c)));
  });
}

// Half precision, kParts in a register: the exact result, rounded once.
template <class T, class Op, int kParts, int kOperands>
void halves(Warp& w, const Instruction& i, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    uint32_t d = 0;
    for (int part = 0; part < kParts; ++part) {
      double x[3] = {};
      for (int n = 0; n < kOperands; ++n) {
        const uint32_t word = w.get<uint32_t>(i.args[1 + n], lane);
        x[n] = value_of(T{static_cast<uint16_t>(word >> (16 * part))});
      }
      T result;
      if constexpr (kOperands == 1) result = rounded<T>(Op::of(x[0]));
      if constexpr (kOperands == 2) result = rounded<T>(Op::of(x[0], x[1]));
      if constexpr (kOperands == 3) result = rounded<T>(Op::of(x[0], x[1], x[2]));
      d |= uint32_t{result.bits} << (16 * part);
    }
    w.put<uint32_t>(i.args[0], lane, d);
  });
}

enum class Compare { kEq, kNe, kLt, kLe, kGt, kGe, kNum, kNan };

template <class T>
bool holds(Compare compare, T a, T b) {
  switch (compare) {
    case Compare::kEq: return a == b;
    case Compare::kNe: return a < b || a > b;  // false with a NaN
    case Compare::kLt: return a < b;
    case Compare::kLe: return a <= b;
    case Compare::kGt: return a > b;
    case Compare::kGe: return a >= b;
    case Compare::kNum: return a == a && b == b;
    case Compare::kNan: return a != a || b != b;
  }
  return false;
}

// kUnordered: holds with a NaN, too. kCombine: ' ' or the operator that joins the result with a predicate.
template <class T, Compare kCompare, bool kUnordered, char kCombine>
void compare(Warp& w, const Instruction& i, uint32_t mask) {
  uint32_t found = 0;
  const int first = i.num_results;
  for (int lane = 0; lane < kLanes; ++lane) {
    const T a = w.get<T>(i.args[first], lane), b = w.get<T>(i.args[first + 1], lane);
    const bool unordered = kUnordered && (a != a || b != b);
    found |= static_cast<uint32_t>(holds(kCompare, a, b) || unordered) << lane;
  }
  const uint32_t with = kCombine == ' ' ? 0 : w.predicate(i, first + 2);
  const auto combined = [&](uint32_t x) {
    return kCombine == '&' ? x & with : kCombine == '|' ? x | with : kCombine == '^' ? x ^ with : x;
  };
  for (int n = 0; n < first; ++n) {
    const uint32_t value = combined(n == 0 ? found : ~found);
    w.put<uint32_t>(i.args[n], 0, (w.predicate(i.args[n]) & ~mask) | (value & mask));
  }
}

template <class T, Compare kCompare, bool kUnordered>
void add_compare(OpcodeTable& t, const std::string& name, const std::string& type) {
  const std::string words = sizeof(T) == 8 ? "ll" : "ww";
  t["setp." + name + "." + type] = {compare<T, kCompare, kUnordered, ' '>, "p=" + words};
  t["setp." + name + "." + type + "|"] = {compare<T, kCompare, kUnordered, ' '>, "pp=" + words};
  t["setp." + name + ".and." + type] = {compare<T, kCompare, kUnordered, '&'>, "p=" + words + "p"};
  t["setp." + name + ".or." + type] = {compare<T, kCompare, kUnordered, '|'>, "p=" + words + "p"};
  t["setp." + name + ".xor." + type] = {compare<T, kCompare, kUnordered, '^'>, "p=" + words + "p"};
}

template <class T>
void add_compares(OpcodeTable& t, const std::string& type) {
  add_compare<T, Compare::kEq, false>(t, "eq", type);
  add_compare<T, Compare::kNe, false>(t, "ne", type);
  add_compare<T, Compare::kLt, false>(t, "lt", type);
  add_compare<T, Compare::kLe, false>(t, "le", type);
  add_compare<T, Compare::kGt, false>(t, "gt", type);
  add_compare<T, Compare::kGe, false>(t, "ge", type);
  if constexpr (std::is_floating_point_v<T>) {
    add_compare<T, Compare::kEq, true>(t, "equ", type);
    add_compare<T, Compare::kNe, true>(t, "neu", type);
    add_compare<T, Compare::kLt, true>(t, "ltu", type);
    add_compare<T, Compare::kLe, true>(t, "leu", type);
    add_compare<T, Compare::kGt, true>(t, "gtu", type);
    add_compare<T, Compare::kGe, true>(t, "geu", type);
    add_compare<T, Compare::kNum, false>(t, "num", type);
    add_compare<T, Compare::kNan, false>(t, "nan", type);
  }
}

template <bool kFlush>
void add_single(OpcodeTable& t) {
  const std::string type = kFlush ? ".ftz.f32" : ".f32";
  for (const char* rounding : {"", ".rn"}) {
    t["add" + (rounding + type)] = {binary<float, Add, kFlush>, "w=ww"};
    t["sub" + (rounding + type)] = {binary<float, Sub, kFlush>, "w=ww"};
    t["mul" + (rounding + type)] = {binary<float, Mul, kFlush>, "w=ww"};
  }
  t["fma.rn" + type] = {ternary<float, Fma, kFlush>, "w=www"};
  t["fma.rm" + type] = {ternary<float, FmaDown, kFlush>, "w=www"};
  for (const char* how : {".rn", ".full", ".approx"}) t["div" + (how + type)] = {binary<float, Div, kFlush>, "w=ww"};
  t["min" + type] = {binary<float, Min, kFlush>, "w=ww"};
  t["max" + type] = {binary<float, Max, kFlush>, "w=ww"};
  t["abs" + type] = {unary<float, Abs, kFlush>, "w=w"};
  t["neg" + type] = {unary<float, Neg, kFlush>, "w=w"};
  for (const char* how : {".rn", ".approx"}) {
    t["rcp" + (how + type)] = {unary<float, Reciprocal, kFlush>, "w=w"};
    t["sqrt" + (how + type)] = {unary<float, Sqrt, kFlush>, "w=w"};
  }
  t["rsqrt.approx" + type] = {unary<float, ReciprocalSqrt, kFlush>, "w=w"};
  t["ex2.approx" + type] = {unary<float, Exp2, kFlush>, "w=w"};
  t["lg2.approx" + type] = {unary<float, Log2, kFlush>, "w=w"};
  t["sin.approx" + type] = {unary<float, Sine, kFlush>, "w=w"};
  t["cos.approx" + type] = {unary<float, Cosine, kFlush>, "w=w"};
}

void add_double(OpcodeTable& t) {
  for (const std::string type : {".f64", ".rn.f64"}) {
    t["add" + type] = {binary<double, Add, false>, "l=ll"};
    t["sub" + type] = {binary<double, Sub, false>, "l=ll"};
    t["mul" + type] = {binary<double, Mul, false>, "l=ll"};
  }
  t["div.rn.f64"] = {binary<double, Div, false>, "l=ll"};
  t["fma.rn.f64"] = {ternary<double, Fma, false>, "l=lll"};
  t["min.f64"] = {binary<double, Min, false>, "l=ll"};
  t["max.f64"] = {binary<double, Max, false>, "l=ll"};
  t["abs.f64"] = {unary<double, Abs, false>, "l=l"};
  t["neg.f64"] = {unary<double, Neg, false>, "l=l"};
}

template <class T, int kParts>
void add_halves(OpcodeTable& t, const std::string& type) {
  t["fma.rn." + type] = {halves<T, FmaOdd, kParts, 3>, "w=www"};
  t["min." + type] = {halves<T, Min, kParts, 2>, "w=ww"};
  t["max." + type] = {halves<T, Max, kParts, 2>, "w=ww"};
  t["abs." + type] = {halves<T, Abs, kParts, 1>, "w=w"};
  t["neg." + type] = {halves<T, Neg, kParts, 1>, "w=w"};
  if constexpr (std::is_same_v<T, Float16>) {  // bfloat16's come with sm_90
    t["add." + type] = {halves<T, Add, kParts, 2>, "w=ww"};
    t["sub." + type] = {halves<T, Sub, kParts, 2>, "w=ww"};
    t["mul." + type] = {halves<T, Mul, kParts, 2>, "w=ww"};
  }
}

}  // namespace

void add_float_opcodes(OpcodeTable& t) {
  add_single<false>(t);
  add_single<true>(t);
  t["min.NaN.f32"] = {binary<float, MinNan, false>, "w=ww"};
  t["max.NaN.f32"] = {binary<float, MaxNan, false>, "w=ww"};
  t["tanh.approx.f32"] = {unary<float, Tanh, false>, "w=w"};
  t["copysign.f32"] = {binary<float, CopySign, false>, "w=ww"};
  add_double(t);
  add_halves<Float16, 1>(t, "f16");
  add_halves<Float16, 2>(t, "f16x2");
  add_halves<BFloat16, 1>(t, "bf16");
  add_halves<BFloat16, 2>(t, "bf16x2");
  add_compares<int16_t>(t, "s16");
  add_compares<uint16_t>(t, "u16");
  add_compares<int32_t>(t, "s32");
  add_compares<uint32_t>(t, "u32");
  add_compares<int64_t>(t, "s64");
  add_compares<uint64_t>(t, "u64");
  add_compares<float>(t, "f32");
  add_compares<double>(t, "f64");
  for (const char* name : {"eq", "ne"}) {
    for (const char* bits : {"16", "32", "64"}) {
      for (const char* suffix : {"", "|"}) {
        t[std::string("setp.") + name + ".b" + bits + suffix] = t[std::string("setp.") + name + ".u" + bits + suffix];
      }
    }
  }
}

}  // namespace cuda_sim
