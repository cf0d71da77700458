// Where the elements of an operand lie: strides, as a problem's --layout says.
#pragma once

#include <cstdint>

#include "testing/array.h"
#include "testing/problem.h"
#include "testing/random.h"

namespace polyhead::testing {

enum class OperandRole {
  kInput,
  kOutput,    // forwards
  kGradient,  // written too, and may run backwards
};

// Sets the strides of `t`, whose dims are set. `values` (null for what is written) tells what the expanded layout may
// repeat. `random` gives the gaps of Layout::kStrided. The layout is not kMixed.
void set_strides(Tensor& t, Layout layout, OperandRole role, const Array* values, Random& random);

// Whether Layout::kQkv puts query, key and value of `desc` side by side.
bool side_by_side(const AttentionDesc& desc);

// Query, key and value (in this order) as parts of `row`, a [.., query + key + value] tensor; their dims are set.
void split_row(const Tensor& row, Tensor (&parts)[3]);

}  // namespace polyhead::testing
