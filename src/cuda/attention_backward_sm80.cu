// The kernels of attention_backward.cuh, attention_backward_plain.cuh and attention_backward_float32.cuh, and delta, that they
// begin with.
#include "cuda/attention_backward.cuh"
#include "cuda/attention_backward_float32.cuh"
#include "cuda/attention_backward_plain.cuh"
#include "cuda/launch.h"

namespace polyhead::cuda {
namespace {

// delta = sum_c dO O - dL, a warp for each row
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ BackwardProblem p) {
  const int64_t heads = (p.packed ? 1 : p.batch) * p.heads, index = blockIdx.x;
  const int64_t b = index % heads / p.heads, h = index % p.heads;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int n = warp; n < kBlockRows; n += kThreads / 32) {
    const int64_t i = index / heads * kBlockRows + n;
    if (i >= p.seqlen_q) return;
    float sum = 0;
    if (p.given_delta.data != nullptr) {
      sum = statistic(p.given_delta, b, h, i);
    } else {
      const auto at = [&](const Rows& x, int c) {
        return load_number(x.data, x.number, b * x.batch + h * x.head + i * x.row + c * x.column);
      };
      for (int c = lane; c < p.head_dim_v; c += 32) sum += at(p.grad_out, c) * at(p.out, c);
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
    }
    if (p.grad_logsumexp.data != nullptr) sum -= statistic(p.grad_logsumexp, b, h, i);
    if (lane == 0) statistic(p.delta, b, h, i) = sum;
  }
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
    delta_kernel<<<p.query_blocks, kThreads, 0, stream>>>(p);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return with_elements(p.elements, [&]<class T>(T) {
    return with_columns(columns_of(p), [&]<int kD>() { return launch_passes<T, kD>(p, of_program, stream); });
  });
}

}  // namespace polyhead::cuda
