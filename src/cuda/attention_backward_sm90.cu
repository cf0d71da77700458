// The kernels of attention_backward_groups.cuh.
#include <type_traits>

#include "cuda/attention_backward_groups.cuh"
#include "cuda/launch.h"

namespace polyhead::cuda {
namespace {

template <class T, int kD, bool kKeys>
constexpr int kGroups = backward_groups(std::is_same_v<T, Float16> ? Number::kFloat16 : Number::kBFloat16, kD, kKeys);
template <class T, int kD, bool kKeys, bool kOptions>
using Memory = BackwardGroupsMemory<T, kD, kKeys, kOptions, kGroups<T, kD, kKeys>>;
static_assert(sizeof(Memory<Float16, 128, true, true>) <= kGroupBytes);
static_assert(sizeof(Memory<Float16, 128, false, true>) <= kGroupBytes);

template <class T, int kD, bool kKeys, bool kOptions>
__global__ void __launch_bounds__((kGroups<T, kD, kKeys> + 1) * kGroupThreads, 1)
    backward_groups_kernel(const __grid_constant__ BackwardProblem problem) {
  backward_by_groups(problem, dynamic_shared<Memory<T, kD, kKeys, kOptions>>());
}

template <class T, int kD, bool kKeys>
cudaError_t launch_pass(const BackwardProblem& problem, unsigned blocks, cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  BackwardProblem p = problem;
  (kKeys ? p.key_blocks : p.query_blocks) = blocks;
  const auto kernel =
      p.has_options ? backward_groups_kernel<T, kD, kKeys, true> : backward_groups_kernel<T, kD, kKeys, false>;
  const size_t bytes = p.has_options ? sizeof(Memory<T, kD, kKeys, true>) : sizeof(Memory<T, kD, kKeys, false>);
  return launch_block(reinterpret_cast<const void*>(kernel), blocks, (kGroups<T, kD, kKeys> + 1) * kGroupThreads,
                      static_cast<int>(bytes), stream, p);
}

template <class T, int kD>
cudaError_t launch_passes(const BackwardProblem& p, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (p.grad_query.data != nullptr) error = launch_pass<T, kD, false>(p, p.group_query_blocks, stream);
  if (error != cudaSuccess || (p.grad_key.data == nullptr && p.grad_value.data == nullptr)) return error;
  return launch_pass<T, kD, true>(p, p.group_key_blocks, stream);
}

template <class T>
cudaError_t launch_columns(const BackwardProblem& p, cudaStream_t stream) {
  return columns_of(p) <= 64 ? launch_passes<T, 64>(p, stream) : launch_passes<T, 128>(p, stream);
}

}  // namespace

cudaError_t launch_backward_groups(const BackwardProblem& p, cudaStream_t stream) {
  return p.elements == Number::kBFloat16 ? launch_columns<BFloat16>(p, stream) : launch_columns<Float16>(p, stream);
}

}  // namespace polyhead::cuda
