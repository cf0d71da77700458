// The kernels of gemm.cuh and few_rows.cuh for one type of elements.
#pragma once

#include "cuda/few_rows.cuh"
#include "cuda/gemm.cuh"
#include "cuda/launch.h"
#include "cuda/linear_launch.h"

namespace polyhead::cuda {

template <class T, int kM, int kN, bool kTermsInsideA, bool kTermsInsideB>
__global__ void __launch_bounds__(kThreads, 2) gemm_kernel(const __grid_constant__ GemmProblem problem) {
  using Product = Gemm<T, kM, kN, kTermsInsideA, kTermsInsideB>;
  Product(problem, dynamic_shared<typename Product::Memory>()).run();
}

template <class T, int kM, int kN, bool kTermsInsideA, bool kTermsInsideB>
cudaError_t launch_tile(const GemmProblem& p, cudaStream_t stream) {
  using Memory = GemmMemory<T, kM, kN, kTermsInsideA, kTermsInsideB>;
  static_assert(sizeof(Memory) <= kEveryGpuBytes);
  const dim3 grid(p.row_tiles * p.column_tiles, static_cast<unsigned>(p.num_slices));
  const auto* kernel = reinterpret_cast<const void*>(gemm_kernel<T, kM, kN, kTermsInsideA, kTermsInsideB>);
  return launch(kernel, grid, sizeof(Memory), stream, p);
}

template <class T, int kM, int kN>
cudaError_t launch_sides(const GemmProblem& p, cudaStream_t stream) {
  if (p.a.terms_inside) {
    return p.b.terms_inside ? launch_tile<T, kM, kN, true, true>(p, stream)
                            : launch_tile<T, kM, kN, true, false>(p, stream);
  }
  return p.b.terms_inside ? launch_tile<T, kM, kN, false, true>(p, stream)
                          : launch_tile<T, kM, kN, false, false>(p, stream);
}

template <class T, bool kTermsInsideB>
__global__ void __launch_bounds__(kThreads, 2) few_rows_kernel(const __grid_constant__ GemmProblem problem) {
  FewRowsProduct<T, kTermsInsideB>(problem, dynamic_shared<FewRowsMemory<T, kTermsInsideB>>()).run();
}

template <class T, bool kTermsInsideB>
cudaError_t launch_few_rows(const GemmProblem& p, cudaStream_t stream) {
  using Memory = FewRowsMemory<T, kTermsInsideB>;
  static_assert(2 * sizeof(Memory) <= kEveryGpuBytes);
  const auto* kernel = reinterpret_cast<const void*>(few_rows_kernel<T, kTermsInsideB>);
  return launch(kernel, dim3(p.column_tiles), sizeof(Memory), stream, p);
}

template <class T>
cudaError_t launch_gemm(const GemmProblem& p, GemmSize size, cudaStream_t stream) {
  if (size == GemmSize::kFew) {
    return p.b.terms_inside ? launch_few_rows<T, true>(p, stream) : launch_few_rows<T, false>(p, stream);
  }
  constexpr Number kNumber = T::kOnTensorCores ? Number::kBFloat16 : Number::kFloat32;  // whose tiles are T's
  constexpr GemmTile kLarge = gemm_tile(kNumber, GemmSize::kLarge), kSmall = gemm_tile(kNumber, GemmSize::kSmall);
  return size == GemmSize::kLarge ? launch_sides<T, kLarge.rows, kLarge.columns>(p, stream)
                                  : launch_sides<T, kSmall.rows, kSmall.columns>(p, stream);
}

}  // namespace polyhead::cuda
