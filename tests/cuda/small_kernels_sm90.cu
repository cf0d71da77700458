// Products of a warpgroup, of tiles that two stages of shared memory hold, swizzled: A and E by rows, whose columns are the
// terms, B by rows that are the terms; and of their result in registers.
#include "cuda/tile.cuh"
#include "small_kernels.h"

namespace small_kernels {
namespace {

using polyhead::cuda::BFloat16;
using polyhead::cuda::commit_copies;
using polyhead::cuda::copy_piece;
using polyhead::cuda::packed;
using polyhead::cuda::shared_address;
using polyhead::cuda::wait_for_copies;

constexpr int kSize = 64, kThreads = 128;  // rows and columns of all tiles

struct alignas(1024) Square {
  uint16_t elements[kSize][kSize];
};

struct Squares {
  Square a[2], b[2], e;
};

__device__ void load(Square& to, const uint16_t* from, int pitch) {
  for (int n = static_cast<int>(threadIdx.x); n < kSize * kSize / 8; n += kThreads) {
    const int row = n / 8, piece = n % 8;
    copy_piece(&to.elements[row][(piece ^ row % 8) * 8], from + row * pitch + piece * 8, true);
  }
}

// Of the tile from its element n on.
__device__ uint64_t descriptor(const Square& tile, int n) {
  constexpr uint64_t kEightRows = 1024 / 16, kSwizzled = 1;
  return shared_address(&tile.elements[0][0] + n) / 16 | kEightRows << 32 | kSwizzled << 62;
}

#define POLYHEAD_SUM(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define POLYHEAD_SUMS                                                                                   \
  POLYHEAD_SUM(0), POLYHEAD_SUM(1), POLYHEAD_SUM(2), POLYHEAD_SUM(3), POLYHEAD_SUM(4), POLYHEAD_SUM(5), \
      POLYHEAD_SUM(6), POLYHEAD_SUM(7)
#define POLYHEAD_INTO_SUMS                                                                                        \
  "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, " \
  "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "

// A block has 64 rows of C = bfloat16(A B) E^T.
__global__ void __launch_bounds__(kThreads)
    group_products_kernel(const uint16_t* A, const uint16_t* B, const uint16_t* E, float* C, int k) {
  Squares& shared = polyhead::cuda::dynamic_shared<Squares>();
  const int thread = static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.x) * kSize;
  const auto load_stage = [&](int stage, int first) {
    if (first >= k) return;
    load(shared.a[stage], A + static_cast<int64_t>(row) * k + first, k);
    load(shared.b[stage], B + static_cast<int64_t>(first) * kSize, kSize);
  };
  float sums[8][4];
  load(shared.e, E, kSize);
  load_stage(0, 0);
  for (int first = 0, stage = 0; first < k; first += kSize, stage ^= 1) {
    commit_copies();
    wait_for_copies();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    load_stage(stage ^ 1, first + kSize);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int step = 0; step < 4; ++step) {
      asm volatile("{.reg .pred add; setp.ne.b32 add, %34, 0; " POLYHEAD_INTO_SUMS "%32, %33, add, 1, 1, 0, 1;}"
                   : POLYHEAD_SUMS
                   : "l"(descriptor(shared.a[stage], 16 * step)), "l"(descriptor(shared.b[stage], 16 * kSize * step)),
                     "r"(first + step));
    }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  unsigned a[4][4];
  for (int step = 0; step < 4; ++step) {
    for (int n = 0; n < 4; ++n) {
      const float* pair = &sums[2 * step + n / 2][n % 2 * 2];
      a[step][n] = packed<BFloat16>(pair[0], pair[1]);
    }
  }
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int step = 0; step < 4; ++step) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %37, 0; " POLYHEAD_INTO_SUMS
                 "{%32, %33, %34, %35}, %36, add, 1, 1, 0;}"
                 : POLYHEAD_SUMS
                 : "r"(a[step][0]), "r"(a[step][1]), "r"(a[step][2]), "r"(a[step][3]),
                   "l"(descriptor(shared.e, 16 * step)), "r"(step));
  }
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int n = 0; n < 8; ++n) {
    for (int e = 0; e < 4; ++e) {
      const int i = row + thread / 32 * 16 + thread % 32 / 4 + e / 2 * 8;
      C[i * kSize + n * 8 + thread % 4 * 2 + e % 2] = sums[n][e];
    }
  }
}

#undef POLYHEAD_SUM
#undef POLYHEAD_SUMS
#undef POLYHEAD_INTO_SUMS

}  // namespace

cudaError_t group_products(const uint16_t* a, const uint16_t* b, const uint16_t* e, float* c, int m, int k,
                           cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(group_products_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Squares));
  if (error != cudaSuccess) return error;
  group_products_kernel<<<static_cast<unsigned>(m / kSize), kThreads, sizeof(Squares), stream>>>(a, b, e, c, k);
  return cudaGetLastError();
}

}  // namespace small_kernels
