// The program of a problem in words: --score TEXT, --mask TEXT (polyhead/program.h), --captured TENSORS.
//
//   TEXT       an expression, or statements of which the last may be an expression: "d = q - k; 0 <= d and d < 256"
//   TENSORS    "slope: f32[h]; table: f32[h, q+k-1] -1..1; doc: i64[b, k] 0..7 rising": what they are drawn by. Sizes are
//              sums of integers and of b, h, q, k, the problem's own. Elements lie within the range: of floats N(0, 1) where
//              none is given, of integers 0 to k - 1, of bools 3 of 4 are true. `rising`: each row, along the last dim, is
//              sorted.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "testing/problem.h"

namespace polyhead::testing {

Result<std::vector<DrawnCapture>> parse_captured(std::string_view text);

// Whether a value of --mask is dims, as "b,1,q,k:padding" or "8,1,512,512", and no program.
bool is_mask_dims(std::string_view value);

// Sets desc.program and desc.captures by the words and the sizes, which are known now. Without such words: nothing.
Status complete_program(Problem& problem);

// " --score '...' --captured '...'", which parse back to the problem's program.
std::string program_line(const Problem& problem);

// The tensors of the problem's program, in its order, but those that `given` has.
std::vector<Array> draw_captures(const Problem& problem, std::span<const Tensor> given);

}  // namespace polyhead::testing
