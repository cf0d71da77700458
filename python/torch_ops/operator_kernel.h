// What is registered with torch: the CPU kernel of one operator.
#pragma once

#include <cstdint>

#include "stable_abi.h"

namespace polyhead::torch_ops {

struct OperatorKernel {
  const char* name;  // "attention_forward.inference": of polyhead's namespace
  void (*kernel)(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
};

}  // namespace polyhead::torch_ops
