#include "program/ops.h"

#include <algorithm>
#include <iterator>

namespace polyhead {
namespace program {
namespace {

constexpr ValueType kSame = ValueType::kFloat, kInt = ValueType::kInt, kBool = ValueType::kBool;

// In the order of Op.
constexpr OpRow kOps[] = {
    {Op::kScore, "score", Form::kName, 0, Takes::kNothing, ValueType::kFloat},
    {Op::kBatch, "b", Form::kName, 0, Takes::kNothing, kInt},
    {Op::kHead, "h", Form::kName, 0, Takes::kNothing, kInt},
    {Op::kQuery, "q", Form::kName, 0, Takes::kNothing, kInt},
    {Op::kKey, "k", Form::kName, 0, Takes::kNothing, kInt},
    {Op::kOffset, "offset", Form::kName, 0, Takes::kNothing, kInt},
    {Op::kConstant, "", Form::kOther, 0, Takes::kNothing, kSame},
    {Op::kGather, "", Form::kOther, 0, Takes::kOther, kSame},
    {Op::kAdd, "+", Form::kInfix, 2, Takes::kNumbers, kSame},
    {Op::kSub, "-", Form::kInfix, 2, Takes::kNumbers, kSame},
    {Op::kMul, "*", Form::kInfix, 2, Takes::kNumbers, kSame},
    {Op::kNeg, "-", Form::kPrefix, 1, Takes::kNumbers, kSame},
    {Op::kAbs, "abs", Form::kCall, 1, Takes::kNumbers, kSame},
    {Op::kMin, "min", Form::kCall, 2, Takes::kNumbers, kSame},
    {Op::kMax, "max", Form::kCall, 2, Takes::kNumbers, kSame},
    {Op::kDiv, "/", Form::kInfix, 2, Takes::kFloats, kSame},
    {Op::kFloor, "floor", Form::kCall, 1, Takes::kFloats, kSame},
    {Op::kExp, "exp", Form::kCall, 1, Takes::kFloats, kSame},
    {Op::kLog, "log", Form::kCall, 1, Takes::kFloats, kSame},
    {Op::kTanh, "tanh", Form::kCall, 1, Takes::kFloats, kSame},
    {Op::kSigmoid, "sigmoid", Form::kCall, 1, Takes::kFloats, kSame},
    {Op::kErf, "erf", Form::kCall, 1, Takes::kFloats, kSame},
    {Op::kSqrt, "sqrt", Form::kCall, 1, Takes::kFloats, kSame},
    {Op::kRsqrt, "rsqrt", Form::kCall, 1, Takes::kFloats, kSame},
    {Op::kSin, "sin", Form::kCall, 1, Takes::kFloats, kSame},
    {Op::kCos, "cos", Form::kCall, 1, Takes::kFloats, kSame},
    {Op::kPow, "pow", Form::kCall, 2, Takes::kFloats, kSame},
    {Op::kFloorDiv, "//", Form::kInfix, 2, Takes::kInts, kInt},
    {Op::kMod, "%", Form::kInfix, 2, Takes::kInts, kInt},
    {Op::kBitAnd, "&", Form::kInfix, 2, Takes::kInts, kInt},
    {Op::kBitOr, "|", Form::kInfix, 2, Takes::kInts, kInt},
    {Op::kBitXor, "^", Form::kInfix, 2, Takes::kInts, kInt},
    {Op::kShiftLeft, "<<", Form::kInfix, 2, Takes::kInts, kInt},
    {Op::kShiftRight, ">>", Form::kInfix, 2, Takes::kInts, kInt},
    {Op::kLess, "<", Form::kInfix, 2, Takes::kNumbers, kBool},
    {Op::kLessEqual, "<=", Form::kInfix, 2, Takes::kNumbers, kBool},
    {Op::kEqual, "==", Form::kInfix, 2, Takes::kNumbers, kBool},
    {Op::kAnd, "and", Form::kInfix, 2, Takes::kBools, kBool},
    {Op::kOr, "or", Form::kInfix, 2, Takes::kBools, kBool},
    {Op::kNot, "not ", Form::kPrefix, 1, Takes::kBools, kBool},
    {Op::kSelect, "where", Form::kCall, 3, Takes::kOther, kSame},
    {Op::kToFloat, "float", Form::kCall, 1, Takes::kOther, ValueType::kFloat},
    {Op::kToInt, "int", Form::kCall, 1, Takes::kOther, kInt},
};

}  // namespace

const OpRow& row_of(Op op) { return kOps[static_cast<int>(op)]; }

const OpRow* function_named(std::string_view name) {
  const OpRow* row = std::find_if(std::begin(kOps), std::end(kOps),
                                  [&](const OpRow& r) { return r.form == Form::kCall && name == r.word; });
  return row == std::end(kOps) ? nullptr : row;
}

}  // namespace program

int ProgramStep::num_operands() const {
  if (op != Op::kGather) return program::row_of(op).num_operands;
  int count = 0;
  while (count < kMostOperands && operands[count] >= 0) ++count;
  return count;
}

}  // namespace polyhead
