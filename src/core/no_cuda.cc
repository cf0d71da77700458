// polyhead/cuda.h in a library without CUDA kernels; src/cuda/machine.cc stands in its place in one that has them.
#include "polyhead/cuda.h"

namespace polyhead {
namespace {

constexpr const char* kReason = "this build of polyhead has no CUDA kernels";

Status refused() { return {StatusCode::kUnsupported, kReason}; }

}  // namespace

CudaMachine cuda_machine() { return {.why_not = kReason, .devices = {}}; }

Result<int> cuda_device_of(const void*) { return refused(); }
Result<int> set_cuda_device(int) { return refused(); }
Result<void*> allocate_cuda(size_t, void*) { return refused(); }
Status free_cuda(void*, void*) { return refused(); }
Status order_cuda_streams(void*, void*) { return refused(); }

}  // namespace polyhead
