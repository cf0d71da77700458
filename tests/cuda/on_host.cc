// cuda_sm80 in the list of kernels for the CPU: the tensors of a call are lent to the device, the simulated one or, where
// that is linked, a real one (lent.h); the call goes through a plan for it and is waited for. So the tests of the CPU's kernels
// are its tests too.
#include <cuda_runtime_api.h>

#include "contract/kernel.h"
#include "core/sentence.h"
#include "cuda/kernels.h"
#include "lent.h"

namespace polyhead {
namespace {

void lend_inputs(Lent& lent, ForwardArgs& args) {
  for (Tensor* input :
       {&args.query, &args.key, &args.value, &args.seqlens_q, &args.seqlens_k, &args.query_offsets, &args.window_lo,
        &args.window_hi, &args.cu_seqlens_q, &args.cu_seqlens_k, &args.page_table, &args.key_scales, &args.value_scales,
        &args.attn_mask, &args.attn_bias, &args.alibi_slopes, &args.sink_logits}) {
    lent.lend(*input, true);
  }
}

// Captures of a call, lent: the call reads the list that this holds.
struct LentList {
  std::vector<Tensor> tensors;

  LentList(Lent& lent, std::span<const Tensor> given, bool written) : tensors(given.begin(), given.end()) {
    for (Tensor& t : tensors) lent.lend(t, written);
  }
};

// Waits for what was launched, also where a later launch was refused: the memory is taken back.
Status finished(const Status& status) {
  const cudaError_t error = cudaDeviceSynchronize();
  if (status.ok() && error == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());
  const char* const words = status.ok() ? cudaGetErrorString(error) : "";
  return {StatusCode::kInternal, sentence(status.message(), words, ": ", take_fault())};
}

// Lengths that are wrong are the CPU kernels' business: a device's are bounded where they lie.
Result<Plan> plan_on_device(const AttentionDesc& desc) { return plan(desc, {"cuda_sm80", {.device = Device::kCuda}}); }

Status forward(const AttentionDesc& desc, const ForwardArgs& on_host, const Run&) {
  const Result<Plan> made = plan_on_device(desc);
  if (!made.ok()) return made.status();
  ForwardArgs args = on_host;
  Lent lent;
  lend_inputs(lent, args);
  const LentList captures(lent, args.captures, true);
  args.captures = captures.tensors;
  for (Tensor* output : {&args.out, &args.logsumexp, &args.attn_weights, &args.column_sums}) lent.lend(*output, false);
  lent.lend(args.workspace, args.workspace_bytes);
  return finished(made->forward(args));
}

Status backward(const AttentionDesc& desc, const BackwardArgs& on_host, const Run&) {
  const Result<Plan> made = plan_on_device(desc);
  if (!made.ok()) return made.status();
  BackwardArgs args = on_host;
  Lent lent;
  lend_inputs(lent, args.forward);
  const LentList captures(lent, args.forward.captures, true), gradients(lent, args.grad_captures, args.accumulate);
  args.forward.captures = captures.tensors;
  args.grad_captures = gradients.tensors;
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
