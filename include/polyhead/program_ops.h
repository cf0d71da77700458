// The steps of a program (polyhead/program.h).
#pragma once

#include <cstdint>

#include "polyhead/api.h"

namespace polyhead {

/// What a value is: a float (float32 in the kernels of float32, bfloat16 and float16, float64 in those of float64), an
/// int64, or a bool.
enum class ValueType : uint8_t { kFloat, kInt, kBool };

/// What a step computes of its operands a, b, c. Integers wrap around; a // 0 and a % 0 are 0.
enum class Op : uint8_t {
  kScore,   ///< float: scale * q.k after softcap, bias and ALiBi; a mask has none
  kBatch,   ///< int: the sequence, 0 to batch - 1
  kHead,    ///< int: the query head, 0 to num_heads - 1
  kQuery,   ///< int: the query within its sequence
  kKey,     ///< int: the key within its sequence
  kOffset,  ///< int: what the desc aligns by: query i stands at key i + offset
  kConstant,
  kGather,  ///< element [a, b, c, d] of a capture, as many indices as it has dims; any other place than a visible pair's
            ///< may lie outside of it
  kAdd,
  kSub,
  kMul,
  kNeg,
  kAbs,
  kMin,
  kMax,  // float or int
  kDiv,
  kFloor,
  kExp,
  kLog,
  kTanh,
  kSigmoid,
  kErf,
  kSqrt,
  kRsqrt,
  kSin,
  kCos,
  kPow,  // float
  kFloorDiv,
  kMod,  ///< int: rounded down, and what that leaves, as in Python
  kBitAnd,
  kBitOr,
  kBitXor,
  kShiftLeft,
  kShiftRight,  ///< int; shifts by less than 0 count as 0, by more than 63 as 63
  kLess,
  kLessEqual,
  kEqual,  ///< float or int -> bool
  kAnd,
  kOr,
  kNot,      ///< bool
  kSelect,   ///< a ? b : c
  kToFloat,  ///< int -> float
  kToInt,    ///< float -> int, towards 0; NaN gives 0, beyond int64 its ends
};

/// One step. Its operands are earlier steps.
struct POLYHEAD_API ProgramStep {
  static constexpr int kMostOperands = 4;

  Op op = Op::kConstant;
  ValueType type = ValueType::kFloat;
  int16_t capture = -1;                                ///< kGather: which
  int32_t operands[kMostOperands] = {-1, -1, -1, -1};  ///< -1: none
  double number = 0;                                   ///< kConstant: a float's value
  int64_t integer = 0;                                 ///< kConstant: an int's, or a bool's as 0 or 1

  bool operator==(const ProgramStep&) const = default;
  int num_operands() const;
};

}  // namespace polyhead
