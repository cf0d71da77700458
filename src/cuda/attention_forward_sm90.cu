// The kernels of attention_forward_groups.cuh.
#include "cuda/attention_forward_groups.cuh"
#include "cuda/launch.h"

namespace polyhead::cuda {
namespace {

constexpr int kGroupsThreads = (kForwardGroups + 1) * kGroupThreads;
static_assert(sizeof(GroupsMemory<Float16, 128, true, kForwardGroups>) <= kGroupBytes);
static_assert(sizeof(GroupsMemory<BFloat16, 64, false, kForwardGroups>) <= kGroupBytes);

template <class T, int kD, bool kOptions>
__global__ void __launch_bounds__(kGroupsThreads, 1) forward_groups_kernel(const __grid_constant__ Problem problem) {
  forward_by_groups(problem, dynamic_shared<GroupsMemory<T, kD, kOptions, kForwardGroups>>());
}

template <class T, int kD, bool kOptions>
cudaError_t launch_kernel(const Problem& p, cudaStream_t stream) {
  return launch_block(reinterpret_cast<const void*>(forward_groups_kernel<T, kD, kOptions>), p.group_blocks,
                      kGroupsThreads, sizeof(GroupsMemory<T, kD, kOptions, kForwardGroups>), stream, p);
}
template <class T, int kD>
cudaError_t launch_groups(const Problem& p, cudaStream_t stream) {
  return p.has_options ? launch_kernel<T, kD, true>(p, stream) : launch_kernel<T, kD, false>(p, stream);
}

template <class T>
cudaError_t launch_columns(const Problem& p, cudaStream_t stream) {
  return columns_of(p) <= 64 ? launch_groups<T, 64>(p, stream) : launch_groups<T, 128>(p, stream);
}

}  // namespace

cudaError_t launch_forward_groups(const Problem& p, cudaStream_t stream) {
  return p.elements == Number::kBFloat16 ? launch_columns<BFloat16>(p, stream) : launch_columns<Float16>(p, stream);
}

}  // namespace polyhead::cuda
