// Kernels to test the runtime and the interpreter with, on device pointers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace small_kernels {

// What a product is compiled with.
enum class Fault {
  kNone,
  kSwappedOperands,  // of the matrix word
  kFragmentRow,      // comes from another place
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

// What causal sums are compiled with.
enum class SumFault {
  kNone,
  kWrongSwizzle,
  kNoSwizzle,  // right, and slow
  kMaskOffByOne,
  kShuffleLane,
  kStaleSharedMemory,
  kMissingSyncwarp,
  kWarpSkipsBarrier,
  kDivergentShuffle,  // of all lanes, in code of half of them
};

// y = a x + y, n elements
void saxpy(float a, const float* x, float* y, int64_t n, cudaStream_t stream);

// C [m, n] float32 = A [m, k] B [k, n], bfloat16, row-major; n and k are multiples of 8.
void product(const uint16_t* a, const uint16_t* b, float* c, int m, int n, int k, Fault fault, cudaStream_t stream);

// sums[i] = sum_{j <= i} x[i][j] + sum_{j <= i'} x[i'][j] of the row i' beside i (i ^ 1), of x [64, 64]; and behind them,
// of each 32 rows, the sum of all such sums.
void causal_sums(const float* x, float* sums, SumFault fault, cudaStream_t stream);

// C [m, 64] float32 = bfloat16(A B) E^T of A [m, k], B [k, 64], E [64, 64], bfloat16; m and k are multiples of 64. By a kernel
// of compute capability 9.0 alone.
cudaError_t group_products(const uint16_t* a, const uint16_t* b, const uint16_t* e, float* c, int m, int k,
                           cudaStream_t stream);

}  // namespace small_kernels
