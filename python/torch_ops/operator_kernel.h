// What is registered with torch: the kernel of one operator, for the CPU or CUDA.
#pragma once

#include <cstdint>

#include "stable_abi.h"

namespace polyhead::torch_ops {

struct OperatorKernel {
  const char* name;  // "attention_forward.inference": of polyhead's namespace
  void (*kernel)(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
};

}  // namespace polyhead::torch_ops
