// What the tensors and the memory of a call must satisfy, whichever list it walks. Nothing is written; an error names the
// argument, what was expected and what came.
#pragma once

#include "layer/steps.h"

namespace polyhead {

// What a call's tensors are expected to be; refused, if the shape has no dims.
Expected expect(int argument, const char* name, const OperandShape& shape);
Expected refuse(int argument, const char* name);
// gamma and beta of a norm over `size`, or their gradients: float32 or `dtype`.
void expect_norm(const NormDesc& desc, Role role, int first_argument, int64_t size, DType dtype, StepList* list);

struct CallMemory {
  size_t reserve_bytes = 0;  // needed, where there is a reserve
  uint64_t fingerprint = 0;
  uint64_t stage = 0;  // 0: forward, which fills the reserve; else what must have been done with it
  const char* owner = "";
};

Status check_call(const StepList& list, const PackedLayout& packed, const CallMemory& memory, const Call& call);

// What pack_weights() is given: the matrices of `list`, and where they go.
Status check_pack(const StepList& list, const PackedLayout& layout, const void* packed, size_t bytes, const Call& call);

Status check_norm_desc(const NormDesc& desc);

// Sizes, a dropout's probability and the type of a layer or block.
struct Size {
  const char* name;
  int64_t value;
};
Status check_not_negative(std::initializer_list<Size> sizes);
Status check_probability(const char* name, double p);

}  // namespace polyhead
