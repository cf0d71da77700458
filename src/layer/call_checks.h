// What the tensors and the memory of a call must satisfy, whichever list it walks. Nothing is written; an error names the
// argument, what was expected and what came.
#pragma once

#include "layer/module.h"

namespace polyhead {

// What a call's tensors are expected to be; refused, if the shape has no dims.
Expected expect(int argument, const char* name, const OperandShape& shape);
Expected refuse(int argument, const char* name);
// gamma and beta of a norm over `size`, or their gradients: float32 or `dtype`.
void expect_norm(const NormDesc& desc, Role role, int first_argument, int64_t size, DType dtype, StepList* list);

// `stage_before`: what must have been done with the reserve before this call; 0: nothing, it is a forward call.
Status check_call(const Module& module, const StepList& list, uint64_t stage_before, const Call& call);

// What prepack_weights() is given: the matrices, and where they go.
Status check_pack(const Module& module, const void* prepacked, size_t bytes, const Call& call);

Status check_norm_desc(const NormDesc& desc);

// Sizes, a dropout's probability and the type of a layer or block.
struct Size {
  const char* name;
  int64_t value;
};
Status check_not_negative(std::initializer_list<Size> sizes);
Status check_probability(const char* name, double p);

}  // namespace polyhead
