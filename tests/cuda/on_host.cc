// cuda_sm80 in the list of kernels for the CPU: the tensors of a call are lent to the simulated device, the call goes
// through a plan for it and is waited for. So the tests of the CPU's kernels are its tests too.
#include <cuda_runtime_api.h>

#include <deque>
#include <vector>

#include "contract/kernel.h"
#include "core/sentence.h"
#include "cuda/kernels.h"
#include "sim/cudart.h"

namespace polyhead {
namespace {

// Memory of a call's tensors, lent while this lives.
class Lent {
 public:
  Lent() = default;
  Lent(const Lent&) = delete;
  ~Lent() {
    for (void* pointer : pointers_) cuda_sim::take_back(pointer);
  }

  void lend(Tensor& t, bool written) {
    t.device = Device::kCuda;
    if (!t.given() || t.num_elements() == 0) return;
    lend_dim(t, static_cast<char*>(t.data), 0, written);
  }

  // Memory that holds nothing yet.
  void lend(void* pointer, size_t bytes) {
    if (bytes == 0) return;
    pointers_.push_back(pointer);
    cuda_sim::lend(pointer, bytes, false);
  }

 private:
  // The block of memory from the first to the last element of `dim` and those inside; in parts where it is large.
  void lend_dim(const Tensor& t, char* at, int dim, bool written) {
    const int64_t element = static_cast<int64_t>(dtype_size_bytes(t.dtype));
    int64_t first = 0, last = 0;
    for (int n = dim; n < t.ndim; ++n) {
      const int64_t reach = (t.dims[n] - 1) * t.strides[n];
      (reach < 0 ? first : last) += reach;
    }
    constexpr int64_t kMost = 16 << 20;
    if (last - first < kMost || dim == t.ndim) {
      pointers_.push_back(at + first * element);
      return cuda_sim::lend(pointers_.back(), static_cast<size_t>((last - first + 1) * element), written);
    }
    for (int64_t n = 0; n < t.dims[dim]; ++n) lend_dim(t, at + n * t.strides[dim] * element, dim + 1, written);
  }

  std::deque<void*> pointers_;
};

void lend_inputs(Lent& lent, ForwardArgs& args) {
  for (Tensor* input : {&args.query, &args.key, &args.value, &args.seqlens_q, &args.seqlens_k, &args.query_offsets,
                        &args.window_lo, &args.window_hi, &args.cu_seqlens_q, &args.cu_seqlens_k, &args.page_table,
                        &args.attn_mask, &args.attn_bias, &args.alibi_slopes, &args.sink_logits}) {
    lent.lend(*input, true);
  }
}

// Waits for what was launched.
Status finished(const Status& status) {
  if (status.ok() && cudaDeviceSynchronize() == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());
  return {StatusCode::kInternal, sentence(status.message(), " ", cuda_sim::take_fault())};
}

// Lengths that are wrong are the CPU kernels' business: a device's are bounded where they lie.
Result<Plan> plan_on_device(const AttentionDesc& desc) { return plan(desc, {"cuda_sm80", {.device = Device::kCuda}}); }

Status forward(const AttentionDesc& desc, const ForwardArgs& on_host, const Run&) {
  const Result<Plan> made = plan_on_device(desc);
  if (!made.ok()) return made.status();
  ForwardArgs args = on_host;
  Lent lent;
  lend_inputs(lent, args);
  lent.lend(args.out, false);
  lent.lend(args.logsumexp, false);
  lent.lend(args.workspace, args.workspace_bytes);
  return finished(made->forward(args));
}

Status backward(const AttentionDesc& desc, const BackwardArgs& on_host, const Run&) {
  const Result<Plan> made = plan_on_device(desc);
  if (!made.ok()) return made.status();
  BackwardArgs args = on_host;
  Lent lent;
  lend_inputs(lent, args.forward);
  for (Tensor* input :
       {&args.forward.out, &args.forward.logsumexp, &args.grad_out, &args.grad_logsumexp, &args.delta}) {
    lent.lend(*input, true);
  }
  for (Tensor* gradient : {&args.grad_query, &args.grad_key, &args.grad_value, &args.grad_attn_bias,
                           &args.grad_alibi_slopes, &args.grad_sink_logits}) {
    lent.lend(*gradient, args.accumulate);
  }
  lent.lend(args.forward.workspace, args.forward.workspace_bytes);
  return finished(made->backward(args));
}

}  // namespace

extern const Kernel kCudaOnHost;
const Kernel kCudaOnHost = {"cuda_sm80_on_host",
                            Device::kCpu,
                            kCudaSm80.why_not,
                            kCudaSm80.workspace_bytes,
                            kCudaSm80.backward_workspace_bytes,
                            forward,
                            backward};

}  // namespace polyhead
