// An element a thread; a product of tensor-core tiles through two stages of shared memory; and sums of what a mask leaves
// of a swizzled tile, which lanes exchange.
#include "cuda/tile.cuh"
#include "small_kernels.h"

namespace small_kernels {
namespace {

using polyhead::cuda::BFloat16;
using polyhead::cuda::commit_copies;
using polyhead::cuda::copy_piece;
using polyhead::cuda::load_matrices;
using polyhead::cuda::load_matrices_transposed;
using polyhead::cuda::multiply_add;

__global__ void saxpy_kernel(float a, const float* x, float* y, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}

constexpr int kRows = 32, kColumns = 32, kDepth = 32,
              kPitch = 40;  // of a tile; bfloat16s from row to row in shared memory

struct Stage {
  uint16_t a[kRows][kPitch], b[kDepth][kPitch];
};

// A block of two warps computes 32 x 32 of C.
template <Fault kFault>
__global__ void product_kernel(const uint16_t* A, const uint16_t* B, float* C, int m, int n, int k) {
  __shared__ __align__(16) Stage stages[2];
  const int row = static_cast<int>(blockIdx.y) * kRows, column = static_cast<int>(blockIdx.x) * kColumns;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  if (kFault == Fault::kEarlyReturn && row + thread / 2 >= m) return;
  const auto load = [&](Stage& to, int depth) {
    constexpr bool kAll = kFault == Fault::kCopyPastTheTail;
    for (int piece = thread; piece < kRows * kDepth / 8; piece += 64) {
      const int i = piece / 4, j = piece % 4 * 8;
      const bool in_a = kAll || (row + i < m && depth + j < k), in_b = kAll || (depth + i < k && column + j < n);
      copy_piece(&to.a[i][j], A + (in_a ? int64_t{row + i} * k + depth + j : 0), in_a);
      copy_piece(&to.b[i][j], B + (in_b ? int64_t{depth + i} * n + column + j : 0), in_b);
    }
    if (kFault != Fault::kMissingCommit) commit_copies();
  };
  float sums[4][4];
  for (int e = 0; e < 16 && kFault != Fault::kUninitialised; ++e) sums[e / 4][e % 4] = 0;
  load(stages[0], 0);
  int stage = 0;
  for (int depth = 0; depth < k; depth += kDepth, stage ^= 1) {
    load(stages[stage ^ 1], depth + kDepth);  // zeros behind the end
    if (kFault == Fault::kWaitOffByOne) asm volatile("cp.async.wait_group 2;" ::: "memory");
    if (kFault != Fault::kWaitOffByOne) asm volatile("cp.async.wait_group 1;" ::: "memory");
    if (kFault != Fault::kMissingBarrier && (kFault != Fault::kHalfWarpBarrier || lane < 16)) __syncthreads();
    const Stage& now = stages[kFault == Fault::kWrongStage ? stage ^ 1 : stage];
    for (int step = 0; step < kDepth; step += 16) {
      unsigned a[4], b[4];
      const int i = kFault == Fault::kFragmentRow ? lane % 16 ^ 1 : lane % 16;
      load_matrices(a, &now.a[warp * 16 + i][step + lane / 16 * 8]);
      if (kFault == Fault::kSwappedOperands) a[0] ^= a[1], a[1] ^= a[0], a[0] ^= a[1];
      for (int half = 0; half < 2; ++half) {
        load_matrices_transposed(b, &now.b[step + lane % 16][half * 16 + lane / 16 * 8]);
        multiply_add<BFloat16>(sums[2 * half], a, b[0], b[1]);
        multiply_add<BFloat16>(sums[2 * half + 1], a, b[2], b[3]);
      }
    }
    if (kFault != Fault::kNoBarrierBeforeReuse) __syncthreads();
  }
  for (int e = 0; e < 16; ++e) {
    const int i = row + warp * 16 + lane / 4 + e % 4 / 2 * 8, j = column + e / 4 * 8 + lane % 4 * 2 + e % 2;
    if (kFault == Fault::kCrossBlockSums) C[i % 2] += sums[e / 4][e % 4];
    if ((i < m || kFault == Fault::kUnguardedTail) && j < n) C[int64_t{i} * n + j] = sums[e / 4][e % 4];
  }
}

constexpr int kSize = 64;  // rows, columns and threads

template <SumFault kFault>
__global__ void causal_sums_kernel(const float4* x, float* result) {
  __shared__ float4 tile[kSize][kSize / 4];
  __shared__ float exchange[kSize];
  const int row = static_cast<int>(threadIdx.x), lane = row % 32;
  const auto swizzled = [](int i, int c) { return kFault == SumFault::kNoSwizzle ? c : c ^ (i & 7); };
  for (int n = row; n < kSize * kSize / 4; n += kSize) {
    const int i = n / (kSize / 4), c = n % (kSize / 4);
    if (kFault == SumFault::kStaleSharedMemory && i == kSize - 1) continue;
    tile[i][swizzled(i, c)] = x[n];
  }
  if (kFault != SumFault::kWarpSkipsBarrier || row < 32) __syncthreads();
  float sum = 0;
  for (int c = 0; c < kSize / 4; ++c) {
    const float4 four = tile[row][kFault == SumFault::kWrongSwizzle ? c ^ (row & 3) : swizzled(row, c)];
    const float numbers[] = {four.x, four.y, four.z, four.w};
    for (int e = 0; e < 4; ++e) {
      const int column = 4 * c + e;
      if (kFault == SumFault::kMaskOffByOne ? column < row : column <= row) sum += numbers[e];
    }
  }
  exchange[row] = sum;
  if (kFault != SumFault::kMissingSyncwarp) __syncwarp();
  sum += exchange[row ^ 1];
  result[row] = sum;
  if (kFault != SumFault::kDivergentShuffle || lane < 16) {
    for (int lanes = kFault == SumFault::kShuffleLane ? 8 : 16; lanes > 0; lanes /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    }
  }
  if (lane == 0) result[kSize + row / 32] = sum;
  if (kFault == SumFault::kWarpSkipsBarrier) __syncthreads();
}

}  // namespace

void saxpy(float a, const float* x, float* y, int64_t n, cudaStream_t stream) {
  saxpy_kernel<<<static_cast<unsigned>((n + 127) / 128), 128, 0, stream>>>(a, x, y, n);
}

template <Fault kFault = Fault::kNone>
void product_of(const uint16_t* a, const uint16_t* b, float* c, int m, int n, int k, Fault fault, cudaStream_t stream) {
  if (fault == kFault) {
    const dim3 grid(static_cast<unsigned>((n + kColumns - 1) / kColumns),
                    static_cast<unsigned>((m + kRows - 1) / kRows));
    product_kernel<kFault><<<grid, 64, 0, stream>>>(a, b, c, m, n, k);
  } else if constexpr (kFault < Fault::kCrossBlockSums) {
    product_of<static_cast<Fault>(static_cast<int>(kFault) + 1)>(a, b, c, m, n, k, fault, stream);
  }
}

void product(const uint16_t* a, const uint16_t* b, float* c, int m, int n, int k, Fault fault, cudaStream_t stream) {
  product_of(a, b, c, m, n, k, fault, stream);
}

template <SumFault kFault = SumFault::kNone>
void sums_of(const float* x, float* sums, SumFault fault, cudaStream_t stream) {
  if (fault == kFault) {
    causal_sums_kernel<kFault><<<1, kSize, 0, stream>>>(reinterpret_cast<const float4*>(x), sums);
  } else if constexpr (kFault < SumFault::kDivergentShuffle) {
    sums_of<static_cast<SumFault>(static_cast<int>(kFault) + 1)>(x, sums, fault, stream);
  }
}

void causal_sums(const float* x, float* sums, SumFault fault, cudaStream_t stream) { sums_of(x, sums, fault, stream); }

}  // namespace small_kernels
