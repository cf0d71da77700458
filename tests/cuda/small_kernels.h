// Kernels to test the runtime and the interpreter with, on device pointers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace small_kernels {

// What a kernel of FaultyProduct is compiled with.
enum class Fault {
  kNone,
  kSwappedOperands,  // of the matrix word
  kWrongSwizzle,     // a row of a fragment comes from another place
  kMissingBarrier,   // between a copy and its readers
  kNoBarrierBeforeReuse,
  kWaitOffByOne,  // of the groups in flight
  kMissingCommit,
  kWrongStage,
  kCopyPastTheTail,
  kUnguardedTail,  // of the result
  kUninitialised,  // sums
  kHalfWarpBarrier,
  kEarlyReturn,
  kCrossBlockSums,  // without atomics
};

// y = a x + y, n elements
void saxpy(float a, const float* x, float* y, int64_t n, cudaStream_t stream);

// C [m, n] float32 = A [m, k] B [k, n], bfloat16, row-major; n and k are multiples of 8.
void product(const uint16_t* a, const uint16_t* b, float* c, int m, int n, int k, Fault fault, cudaStream_t stream);

}  // namespace small_kernels
