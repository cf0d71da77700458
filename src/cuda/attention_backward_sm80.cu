// The kernels of attention_backward.cuh, attention_backward_plain.cuh and attention_backward_float32.cuh, and of delta.cuh, that
// they begin with.
#include "cuda/attention_backward.cuh"
#include "cuda/attention_backward_float32.cuh"
#include "cuda/attention_backward_plain.cuh"
#include "cuda/delta.cuh"
#include "cuda/launch.h"

namespace polyhead::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ BackwardProblem p) {
  deltas<T>(p);
}

cudaError_t launch_delta(const BackwardProblem& p, cudaStream_t stream) {
  return with_elements(p.elements, [&]<class T>(T) {
    delta_kernel<T><<<p.query_blocks, kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

template <class T, int kD, int kPass, bool kExact, bool kOptions>
__global__ void __launch_bounds__(kThreads, kD > 128 ? 1 : 2)
    backward_kernel(const __grid_constant__ BackwardProblem problem) {
  Backward<T, kD, kPass, kExact, kOptions>(problem, dynamic_shared<PairsMemory<T, kD>>()).run();
}

// 168 registers are enough for sums of 64 columns, 255 for those of 128.
template <class T, int kD, bool kKeys>
__global__ void __launch_bounds__(kThreads, kD > 64 ? 2 : 3)
    backward_plain_kernel(const __grid_constant__ BackwardProblem problem) {
  PlainBackward<T, kD, kKeys>(problem, dynamic_shared<PlainBackwardMemory<T, kD>>()).run();
}

template <int kD, bool kKeys>
__global__ void __launch_bounds__(kThreads, 3) backward_wide_kernel(const __grid_constant__ BackwardProblem problem) {
  Float32Backward<kD, kKeys>(problem, dynamic_shared<Float32BackwardMemory<kD, kKeys>>()).run();
}
static_assert(sizeof(Float32BackwardMemory<128, true>) <= 228 * 1024 / 3 - 1024, "three blocks on an H100");

template <class T, int kD>
constexpr bool kHasPlain = kD <= kMostWideColumns;
static_assert(sizeof(PlainBackwardMemory<Float16, kMostWideColumns>) <= kEveryGpuBytes);

template <class T, int kD, int kPass>
cudaError_t launch_pass(const BackwardProblem& p, const ProgramKernels& of_program, cudaStream_t stream) {
  const unsigned blocks = kPass == kOfQuery ? p.query_blocks : p.key_blocks;
  if (blocks == 0) return cudaSuccess;
  if constexpr (kHasPlain<T, kD>) {
    constexpr bool kKeys = kPass != kOfQuery;
    if constexpr (T::kOnTensorCores) {
      if (!p.has_options && !p.exact) {
        const auto plain = backward_plain_kernel<T, kD, kKeys>;
        return launch(reinterpret_cast<const void*>(plain), blocks, sizeof(PlainBackwardMemory<T, kD>), stream, p);
      }
    } else if (p.wide) {
      const auto plain = backward_wide_kernel<kD, kKeys>;
      return launch(reinterpret_cast<const void*>(plain), blocks, sizeof(Float32BackwardMemory<kD, kKeys>), stream, p);
    }
  }
  auto kernel = backward_kernel<T, kD, kPass, false, true>;
  if constexpr (!kHasPlain<T, kD>) {
    if (!p.has_options) kernel = backward_kernel<T, kD, kPass, false, false>;
  }
  if constexpr (T::kOnTensorCores) {
    if (p.exact) kernel = backward_kernel<T, kD, kPass, true, true>;  // asks for each option
  }
  const void* const program = of_program.backward[kPass];
  const int columns = kPass == kOfValue ? p.head_dim_v : p.head_dim, slice = kSliceColumns<T, kD>;
  const auto slices = static_cast<unsigned>(columns > slice ? (columns + slice - 1) / slice : 1);
  return launch(program != nullptr ? program : reinterpret_cast<const void*>(kernel), dim3(blocks, slices),
                sizeof(PairsMemory<T, kD>), stream, p);
}

template <class T, int kD>
cudaError_t launch_passes(const BackwardProblem& p, const ProgramKernels& of_program, cudaStream_t stream) {
  const bool of_query = p.grad_query.data != nullptr, of_key = p.grad_key.data != nullptr,
             of_value = p.grad_value.data != nullptr;
  cudaError_t error = cudaSuccess;
  if (of_query) error = launch_pass<T, kD, kOfQuery>(p, of_program, stream);
  if constexpr (kD > 128) {
    if (error == cudaSuccess && of_key) error = launch_pass<T, kD, kOfKey>(p, of_program, stream);
    if (error == cudaSuccess && of_value) error = launch_pass<T, kD, kOfValue>(p, of_program, stream);
  } else if (error == cudaSuccess && (of_key || of_value)) {
    error = launch_pass<T, kD, kOfKeyAndValue>(p, of_program, stream);
  }
  return error;
}

}  // namespace

cudaError_t launch_backward(const BackwardProblem& p, const ProgramKernels& of_program, cudaStream_t stream) {
  if (p.query_blocks > 0 && p.softmax) {
    if (const cudaError_t error = launch_delta(p, stream); error != cudaSuccess) return error;
  }
  if (p.group_query_blocks > 0 || p.group_key_blocks > 0) return launch_backward_groups(p, stream);
  return with_elements(p.elements, [&]<class T>(T) {
    return with_columns(columns_of(p), [&]<int kD>() { return launch_passes<T, kD>(p, of_program, stream); });
  });
}

}  // namespace polyhead::cuda
