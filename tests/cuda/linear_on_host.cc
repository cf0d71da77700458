// cuda_sm80 in the list of kernels for products, epilogues and norms: a call's matrices are lent to the device, the simulated
// one or, where that is linked, a real one (lent.h), and the call is waited for. So the tests of the CPU's kernels are its
// tests too.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <deque>

#include "core/dtype.h"
#include "core/sentence.h"
#include "cuda/linear_kernels.h"
#include "lent.h"

namespace polyhead::linear {
namespace {

// The memory of one call. What lies in the same place of the host lies in one of the device.
class OnDevice {
 public:
  // Inputs come first: outputs may be one of them.
  void lend(Matrix& x, bool written) {
    if (!x.given() || x.rows.size() == 0 || x.columns.size() == 0) return;
    Tensor all(x.data, x.dtype, {});
    for (const Axis* axis : {&x.rows, &x.columns}) {
      for (int d = 0; d < 3; ++d) {
        if (axis->sizes[d] == 1) continue;
        if (all.ndim == Tensor::kMaxDims) std::abort();  // no test has so many
        all.dims[all.ndim] = axis->sizes[d];
        all.strides[all.ndim++] = axis->strides[d];
      }
    }
    if (all.ndim == 0) all.dims[all.ndim++] = 1;
    x.data = lent(all, written);
  }
  void lend(Epilogue& epilogue) {
    lend(epilogue.bias, true);
    lend(epilogue.residual, true);
    if (epilogue.gradient) lend(epilogue.pre_activation, true);
  }
  template <class Pointer>
  void lend(Pointer& data, DType dtype, int64_t size, bool written) {
    if (data == nullptr || size == 0) return;
    data = lent(Tensor(const_cast<void*>(static_cast<const void*>(data)), dtype, {size}), written);
  }
  void lend(Tensor& t) {
    if (t.given() && t.num_elements() > 0) t.data = lent(t, true);
  }
  // Of no use afterwards: what a call writes for its caller is an output.
  void lend_workspace(void*& workspace, MemorySize bytes) { lent_.lend(workspace, bytes.value()); }

  // Waits for what was launched, also where a later launch was refused: the memory is taken back.
  Status finished(const Status& status) const {
    const cudaError_t error = cudaDeviceSynchronize();
    if (status.ok() && error == cudaSuccess) return {};
    static_cast<void>(cudaGetLastError());
    const char* const words = status.ok() ? cudaGetErrorString(error) : "";
    return {StatusCode::kInternal, sentence(status.message(), words, ": ", take_fault())};
  }

 private:
  void* lent(Tensor t, bool written) {
    void* const host = t.data;
    for (const auto& [at, device] : places_) {
      if (at == host) return device;
    }
    lent_.lend(t, written);
    places_.push_back({host, t.data});
    return t.data;
  }

  struct Place {
    void *host, *device;
  };
  std::deque<Place> places_;
  Lent lent_;
};

const Run kStream(nullptr, 1);

Status pack(const Matrix& b, void* packed, const Run&) {
  OnDevice device;
  Matrix from = b;
  device.lend(from, true);
  const auto bytes = kCudaSm80.packed_bytes(b.rows.size(), b.columns.size(), b.dtype).value();
  device.lend(packed, DType::kInt8, static_cast<int64_t>(bytes), false);
  return device.finished(kCudaSm80.pack(from, packed, kStream));
}

Status gemm(const GemmDesc& desc, const GemmArgs& on_host, const Run&) {
  OnDevice device;
  GemmArgs args = on_host;
  device.lend(args.a, true);
  device.lend(args.b, true);
  const auto packed = static_cast<int64_t>(kCudaSm80.packed_bytes(desc.k, desc.n, desc.dtype).value());
  device.lend(args.prepacked, DType::kInt8, packed, true);
  device.lend(args.epilogue);
  device.lend(args.c, args.accumulate);
  device.lend(args.epilogue.pre_activation, false);
  device.lend_workspace(args.workspace, kCudaSm80.gemm_workspace_bytes(desc, 1));
  return device.finished(kCudaSm80.gemm(desc, args, kStream));
}

Status pointwise(const PointwiseArgs& on_host, const Run&) {
  OnDevice device;
  PointwiseArgs args = on_host;
  device.lend(args.x, true);
  device.lend(args.epilogue);
  device.lend(args.y, args.accumulate);
  device.lend(args.epilogue.pre_activation, false);
  device.lend(args.sums, args.accumulate_sums);
  const auto bytes = kCudaSm80.sums_workspace_bytes(args.x.rows.size(), args.x.columns.size(), args.x.dtype);
  if (args.sums.given()) device.lend_workspace(args.workspace, bytes);
  return device.finished(kCudaSm80.pointwise(args, kStream));
}

Status norm_forward(const NormForwardArgs& on_host, const Run&) {
  OnDevice device;
  NormForwardArgs args = on_host;
  for (Matrix* input : {&args.x, &args.residual, &args.gamma, &args.beta}) device.lend(*input, true);
  device.lend(args.sum, false);
  device.lend(args.y, false);
  for (void** statistic : {&args.mean, &args.rstd}) device.lend(*statistic, DType::kFloat32, args.x.rows.size(), false);
  return device.finished(kCudaSm80.norm_forward(args, kStream));
}

Status norm_backward(const NormBackwardArgs& on_host, const Run&) {
  OnDevice device;
  NormBackwardArgs args = on_host;
  for (Matrix* input : {&args.x, &args.gamma, &args.grad_y, &args.residual}) device.lend(*input, true);
  device.lend(args.mean, DType::kFloat32, args.x.rows.size(), true);
  device.lend(args.rstd, DType::kFloat32, args.x.rows.size(), true);
  device.lend(args.grad_x, args.accumulate_x);
  for (Matrix* sums : {&args.grad_gamma, &args.grad_beta}) device.lend(*sums, args.accumulate_parameters);
  const auto bytes = kCudaSm80.sums_workspace_bytes(args.x.rows.size(), args.x.columns.size(), args.x.dtype);
  if (args.workspace != nullptr) device.lend_workspace(args.workspace, bytes);
  return device.finished(kCudaSm80.norm_backward(args, kStream));
}

Status copy_rows(const CopyRowsArgs& on_host, const Run&) {
  OnDevice device;
  CopyRowsArgs args = on_host;
  device.lend(args.x, true);
  device.lend(args.y, false);
  for (Tensor& lengths : args.lengths) device.lend(lengths);
  return device.finished(kCudaSm80.copy_rows(args, kStream));
}

Status sum_heads(const SumHeadsArgs& on_host, const Run&) {
  OnDevice device;
  SumHeadsArgs args = on_host;
  device.lend(args.x, true);
  device.lend(args.y, args.accumulate);
  return device.finished(kCudaSm80.sum_heads(args, kStream));
}

Status clear(void* data, size_t bytes, const Run&) {
  OnDevice device;
  device.lend(data, DType::kInt8, static_cast<int64_t>(bytes), false);
  return device.finished(kCudaSm80.clear(data, bytes, kStream));
}

}  // namespace

extern const Kernel kCudaOnHost;
const Kernel kCudaOnHost = {"cuda_sm80_on_host",
                            Device::kCpu,
                            kCudaSm80.why_not,
                            kCudaSm80.packed_bytes,
                            pack,
                            kCudaSm80.panel_columns,
                            kCudaSm80.gemm_workspace_bytes,
                            gemm,
                            kCudaSm80.sums_workspace_bytes,
                            pointwise,
                            norm_forward,
                            norm_backward,
                            copy_rows,
                            sum_heads,
                            clear};

}  // namespace polyhead::linear
