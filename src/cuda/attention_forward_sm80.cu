// The kernels of attention_forward.cuh and attention_forward_wide.cuh, and what merges the parts of a row: parts.cuh.
#include <type_traits>

#include "cuda/attention_forward.cuh"
#include "cuda/attention_forward_float32.cuh"
#include "cuda/attention_forward_wide.cuh"
#include "cuda/launch.h"

namespace polyhead::cuda {
namespace {

static_assert(sizeof(ForwardMemory<Float32, kManyColumns>) <= kEveryGpuBytes);
static_assert(sizeof(ForwardMemory<BFloat16, kManyColumns>) <= kEveryGpuBytes);
static_assert(sizeof(WideMemory<Float32, 64>) <= kEveryGpuBytes);
static_assert(sizeof(WideMemory<BFloat16, 128>) <= kEveryGpuBytes);
static_assert(sizeof(WideMemory<Float32, 128>) <=
              75 * 1024);  // of 8.0 on a multiprocessor has room for two, of 9.0 for three

template <class T, int kD, bool kOptions>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(const __grid_constant__ Problem problem) {
  Forward<T, kD, kOptions>(problem, dynamic_shared<ForwardMemory<T, kD>>()).run();
}

template <int kD>
__global__ void __launch_bounds__(kThreads, 2) forward_stored_kernel(const __grid_constant__ StoredProblem problem) {
  Forward<Float32, kD, true, true>(problem, dynamic_shared<ForwardMemory<Float32, kD>>()).run();
}

// Of a multiprocessor that has memory for them. No more, lest registers spill.
template <class T, int kD>
constexpr int kWideBlocks = sizeof(T) * kD > 256                                 ? 3
                            : sizeof(T) * kD > 128 || std::is_same_v<T, Float16> ? 2
                                                                                 : 3;

template <class T, int kD>
__global__ void __launch_bounds__(kThreads, (kWideBlocks<T, kD>))
    forward_wide_kernel(const __grid_constant__ Problem problem) {
  WideForward<T, kD>(problem, dynamic_shared<WideMemory<T, kD>>()).run();
}

template <class T, int kD>
dim3 grid_of(const Problem& p) {
  constexpr int kColumns = ForwardMemory<T, kD>::kColumns;
  const int column_blocks = p.head_dim_v > kColumns ? (p.head_dim_v + kColumns - 1) / kColumns : 1;
  return dim3(p.query_blocks, static_cast<unsigned>(p.parts), static_cast<unsigned>(column_blocks));
}

template <class T, int kD>
cudaError_t launch_kernel(const Problem& p, const void* of_program, cudaStream_t stream) {
  if constexpr (kD <= kMostWideColumns) {
    if (p.wide) {
      static_assert(std::is_same_v<T, Float32> ? wide_rows(Number::kFloat32, kD) == WideMemory<T, kD>::kRows
                                               : wide_rows(Number::kBFloat16, kD) == WideMemory<T, kD>::kRows);
      return launch(reinterpret_cast<const void*>(forward_wide_kernel<T, kD>), p.query_blocks,
                    sizeof(WideMemory<T, kD>), stream, p);
    }
  }
  const auto kernel = p.has_options ? forward_kernel<T, kD, true> : forward_kernel<T, kD, false>;
  return launch(of_program != nullptr ? of_program : reinterpret_cast<const void*>(kernel), grid_of<T, kD>(p),
                sizeof(ForwardMemory<T, kD>), stream, p);
}

// A warp merges the parts of a row.
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ Problem p, int64_t rows) {
  const int64_t n = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (n >= rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t i = n % p.seqlen_q, h = n / p.seqlen_q % p.heads, b = n / p.seqlen_q / p.heads;
  if (p.group_blocks > 0 && rows_of_sequence(p, i) > kBlockRows) return;
  const RowParts parts(p, n);
  const RowSums sums = parts.merged();
  const FinishedRow<true> finished(p, h, sums);
  const int64_t out = b * p.out.batch + h * p.out.head + i * p.out.row;
#pragma unroll 1
  for (int from = lane; from < p.head_dim_v; from += kMostTileColumns) {
    float O[kMostTileColumns / 32] = {};
    parts.merge_sums(sums.m, from, O);
#pragma unroll
    for (int c = 0; c < kMostTileColumns / 32; ++c) {
      const int column = from + 32 * c;
      if (column < p.head_dim_v)
        store_number(p.out.data, p.out.number, out + column * p.out.column, finished.out(O[c]));
    }
  }
  if (p.logsumexp.data != nullptr && lane == 0) statistic(p.logsumexp, b, h, i) = finished.logsumexp();
}

cudaError_t launch_merge(const Problem& p, cudaStream_t stream) {
  const int64_t rows = (p.packed ? 1 : p.batch) * p.heads * p.seqlen_q, of_block = kThreads / 32;
  merge_kernel<<<static_cast<unsigned>((rows + of_block - 1) / of_block), kThreads, 0, stream>>>(p, rows);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_forward(const Problem& p, const ProgramKernels& of_program, cudaStream_t stream) {
  if (p.group_blocks > 0) {
    const cudaError_t error = launch_forward_groups(p, stream);
    if (error != cudaSuccess || !p.packed) return error;
  }
  const cudaError_t error = with_elements(p.elements, [&]<class T>(T) {
    return with_columns(columns_of(p), [&]<int kD>() { return launch_kernel<T, kD>(p, of_program.forward, stream); });
  });
  return error == cudaSuccess && p.parts > 1 ? launch_merge(p, stream) : error;
}

cudaError_t launch_forward_stored(const StoredProblem& p, const ProgramKernels& of_program, cudaStream_t stream) {
  const cudaError_t error = with_columns(columns_of(p), [&]<int kD>() {
    const void* const kernel =
        of_program.forward != nullptr ? of_program.forward : reinterpret_cast<const void*>(forward_stored_kernel<kD>);
    return launch(kernel, grid_of<Float32, kD>(p), sizeof(ForwardMemory<Float32, kD>), stream, p);
  });
  return error == cudaSuccess && p.parts > 1 ? launch_merge(p, stream) : error;
}

}  // namespace polyhead::cuda
