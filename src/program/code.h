// A program as the kernels that work on tiles run it. Plain data and no library code: kernels compiled for one
// instruction set include this too. src/program/schedule.cc makes it.
#pragma once

#include <cstdint>

#include "polyhead/program_ops.h"

namespace polyhead::program {

// What a value depends on, besides batch and head.
enum class Rate : uint8_t { kUniform, kQuery, kKey, kDiagonal, kFull };  // kDiagonal: q - k alone

// Ops that a program itself does not have.
constexpr Op kDiagonal{64};  // int: q - k
constexpr Op kGradient{65};  // float: the gradient of the program's score
constexpr Op kChain{66};     // a * b, 0 where a is 0: an infinite slope of what was not used must not become NaN

struct Instruction {
  Op op = Op::kConstant;
  ValueType type = ValueType::kFloat;
  ValueType takes = ValueType::kFloat;  // the type of its last operand
  Rate rate = Rate::kUniform;
  int16_t capture = -1, num_operands = 0;
  int32_t operands[ProgramStep::kMostOperands] = {-1, -1, -1, -1};  // instructions
  float number = 0;
  int64_t integer = 0;

  bool operator==(const Instruction&) const = default;
};

// What a tile's memory holds of a value of a low rate: elements.
constexpr int kCodeQueries = 64, kCodeKeys = 128;
constexpr int kDiagonals = kCodeQueries + kCodeKeys;  // one more than there are
constexpr int width_of(Rate rate) {
  switch (rate) {
    case Rate::kUniform: return 16;
    case Rate::kQuery: return kCodeQueries;
    case Rate::kKey: return kCodeKeys;
    case Rate::kDiagonal: return kDiagonals;
    case Rate::kFull: break;
  }
  return 0;
}

// Instructions in an order in which they can run, for some results.
struct Pass {
  const int32_t* low = nullptr;   // those of a lower rate than kFull,
  const int32_t* full = nullptr;  // and the others
  // Of each instruction: where its value lies, in elements from the start of the memory of low rates, or the register of a
  // strip; -1: the pass does not compute it.
  const int32_t* place = nullptr;
  int num_low = 0, num_full = 0, num_registers = 0, low_elements = 0;
};

// The gradient of an element that the program reads.
struct GatherGradient {
  int32_t gather, adjoint;  // instructions
  int capture;
};

struct Code {
  const Instruction* instructions = nullptr;
  int num_instructions = 0;
  int mask = -1, score = -1;  // instructions; -1: none
  bool mask_reads_head = false;
  int score_gradient = -1;    // of the score that is read, from that of the program's; -1: it is not read
  bool same_gradient = true;  // score_gradient is kGradient itself, or there is no score
  const GatherGradient* gathers = nullptr;
  int num_gathers = 0;
  Pass for_mask, for_score, for_score_gradient;
  Pass for_gradients;  // of the score and of all captures
  // The same mask and score, with queries and keys in each other's places: for who has keys along the lanes. It has none.
  const Code* transposed = nullptr;
};

}  // namespace polyhead::program
