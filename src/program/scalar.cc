#include "program/scalar.h"

#include <algorithm>
#include <cmath>

#include "core/dtype.h"
#include "program/integers.h"

namespace polyhead::program {
namespace {

Scalar load(const Tensor& t, const Instruction& gather, const Scalar* values) {
  if (t.num_elements() == 0) return {};
  int64_t at = 0;
  for (int n = 0; n < gather.num_operands; ++n) {
    at += std::clamp<int64_t>(values[gather.operands[n]].integer, 0, t.dims[n] - 1) * t.strides[n];
  }
  switch (t.dtype) {
    case DType::kBool: return {0, static_cast<const uint8_t*>(t.data)[at] != 0};
    case DType::kInt32: return {0, static_cast<const int32_t*>(t.data)[at]};
    case DType::kInt64: return {0, static_cast<const int64_t*>(t.data)[at]};
    default: return {static_cast<float>(load_element(t.data, t.dtype, at)), 0};
  }
}

float of_floats(Op op, float a, float b) {
  switch (op) {
    case Op::kAdd: return a + b;
    case Op::kSub: return a - b;
    case Op::kMul: return a * b;
    case Op::kDiv: return a / b;
    case Op::kNeg: return -a;
    case Op::kAbs: return std::fabs(a);
    case Op::kMin: return a != a || a < b ? a : b;
    case Op::kMax: return a != a || a > b ? a : b;
    case Op::kFloor: return std::floor(a);
    case Op::kExp: return std::exp(a);
    case Op::kLog: return std::log(a);
    case Op::kTanh: return std::tanh(a);
    case Op::kSigmoid: return 1 / (1 + std::exp(-a));
    case Op::kErf: return std::erf(a);
    case Op::kSqrt: return std::sqrt(a);
    case Op::kRsqrt: return 1 / std::sqrt(a);
    case Op::kSin: return std::sin(a);
    case Op::kCos: return std::cos(a);
    case Op::kPow: return std::pow(a, b);
    default: return 0;
  }
}

int64_t of_ints(Op op, int64_t a, int64_t b) {
  switch (op) {
    case Op::kAdd: return add(a, b);
    case Op::kSub: return subtract(a, b);
    case Op::kMul: return multiply(a, b);
    case Op::kNeg: return subtract<int64_t>(0, a);
    case Op::kAbs: return a < 0 ? subtract<int64_t>(0, a) : a;
    case Op::kMin: return std::min(a, b);
    case Op::kMax: return std::max(a, b);
    case Op::kFloorDiv: return floor_div(a, b);
    case Op::kMod: return floor_mod(a, b);
    case Op::kBitAnd:
    case Op::kAnd: return a & b;
    case Op::kBitOr:
    case Op::kOr: return a | b;
    case Op::kBitXor: return a ^ b;
    case Op::kShiftLeft: return shift_left(a, b);
    case Op::kShiftRight: return shift_right(a, b);
    case Op::kLess: return a < b;
    case Op::kLessEqual: return a <= b;
    case Op::kEqual: return a == b;
    case Op::kNot: return 1 - a;
    default: return 0;
  }
}

Scalar value(const Instruction& x, const Tensor* captures, const Place& at, const Scalar* values) {
  if (x.op == kDiagonal) return {0, at.diagonal};
  switch (x.op) {
    case Op::kBatch: return {0, at.b};
    case Op::kHead: return {0, at.h};
    case Op::kQuery: return {0, at.q};
    case Op::kKey: return {0, at.k};
    case Op::kOffset: return {0, at.offset};
    case Op::kConstant: return {x.number, x.integer};
    case Op::kGather: return load(captures[x.capture], x, values);
    case Op::kSelect: return values[x.operands[values[x.operands[0]].integer != 0 ? 1 : 2]];
    case Op::kToFloat: return {static_cast<float>(values[x.operands[0]].integer), 0};
    case Op::kToInt: return {0, to_int<int64_t>(values[x.operands[0]].number)};
    default: break;
  }
  if (x.num_operands == 0) return {};
  const Scalar& a = values[x.operands[0]];
  const Scalar& b = values[x.operands[x.num_operands - 1]];
  if (x.takes != ValueType::kFloat) return {0, of_ints(x.op, a.integer, b.integer)};
  switch (x.op) {
    case Op::kLess: return {0, a.number < b.number};
    case Op::kLessEqual: return {0, a.number <= b.number};
    case Op::kEqual: return {0, a.number == b.number};
    default: return {of_floats(x.op, a.number, b.number), 0};
  }
}

}  // namespace

void evaluate(const Code& code, const Pass& pass, const Tensor* captures, const Place& at, Scalar* values) {
  for (int i = 0; i < code.num_instructions; ++i) {
    if (pass.place[i] >= 0) values[i] = value(code.instructions[i], captures, at, values);
  }
}

void evaluate_low(const Code& code, const Pass& pass, const Tensor* captures, const Place& at, Scalar* values) {
  for (int i = 0; i < pass.num_low; ++i) {
    values[pass.low[i]] = value(code.instructions[pass.low[i]], captures, at, values);
  }
}

int64_t element(const Instruction& gather, const Tensor* captures, const Scalar* values) {
  const Tensor& t = captures[gather.capture];
  int64_t at = 0;
  for (int n = 0; n < gather.num_operands; ++n) {
    const int64_t last = t.dims[n] > 0 ? t.dims[n] - 1 : 0;
    at = at * t.dims[n] + std::clamp<int64_t>(values[gather.operands[n]].integer, 0, last);
  }
  return at;
}

}  // namespace polyhead::program
