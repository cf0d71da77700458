// The code of a program, value by value: for the few that no tile computes.
#pragma once

#include "program/call.h"

namespace polyhead::program {

struct Scalar {
  float number;
  int64_t integer;  // of a bool 0 or 1
};

// The instructions of a pass, each at its number: of low rates, and, of the mask's, all.
void evaluate_low(const Code& code, const Pass& pass, const Tensor* captures, const Place& at, Scalar* values);
void evaluate(const Code& code, const Pass& pass, const Tensor* captures, const Place& at, Scalar* values);

// The element that a gather reads, counted in row-major order.
int64_t element(const Instruction& gather, const Tensor* captures, const Scalar* values);

}  // namespace polyhead::program
