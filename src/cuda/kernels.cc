// What of a desc the CUDA kernels take, and how a call's tensors are told to them.
#include "cuda/kernels.h"

#include <cmath>

#include "core/sentence.h"
#include "cuda/forward_problem.h"

namespace polyhead {
namespace cuda {
namespace {

// Why the calling thread's current device cannot run these kernels; "" if it can.
std::string why_no_device() {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // so that the caller's next question is not answered with it
    return sentence("no CUDA device can be used here: ", cudaGetErrorString(error));
  }
  if (major >= 8) return "";
  return sentence("the GPU's compute capability is ", major, ", takes 8 and up");
}

std::string size_taken(const char* name, int64_t size) {
  return size <= kMostHeadDim ? "" : sentence(name, " is ", size, ", takes 0 to ", kMostHeadDim);
}

std::string option_refused(const AttentionDesc& desc) {
  struct Option {
    bool given;
    const char* name;
  };
  const Option options[] = {{desc.packed, "packed"},
                            {desc.softcap != 0, "softcap"},
                            {desc.has_windows, "windows of each query"},
                            {desc.attn_mask.given, "attn_mask"},
                            {desc.attn_bias.given, "attn_bias"},
                            {desc.alibi_slopes_ndim > 0, "alibi_slopes"},
                            {desc.dropout_p > 0, "dropout"},
                            {desc.return_weights != ReturnWeights::kNone, "return_weights"},
                            {desc.return_column_sums, "return_column_sums"},
                            {desc.program != nullptr, "a program"}};
  for (const auto& [given, name] : options) {
    if (given) return sentence(name, " is given, which this kernel does not compute");
  }
  return "";
}

// Blocks of threads in a grid; too large if there are more than a grid may have.
MemorySize num_blocks(const AttentionDesc& desc) {
  return MemorySize(desc.batch) * MemorySize(desc.num_heads) * MemorySize(pieces(desc.seqlen_q, kQueryRows));
}

std::string why_not(const AttentionDesc& desc) {
  if (desc.dtype != DType::kBFloat16 && desc.dtype != DType::kFloat16) {
    return sentence("dtype is ", dtype_name(desc.dtype), ", takes bfloat16 or float16");
  }
  if (out_dtype(desc) != desc.dtype) {
    return sentence("out_dtype is ", dtype_name(out_dtype(desc)), ", takes the query's dtype");
  }
  for (const std::string& reason :
       {size_taken("head_dim", desc.head_dim), size_taken("head_dim_v", desc.head_dim_v), option_refused(desc)}) {
    if (!reason.empty()) return reason;
  }
  if (num_blocks(desc) > MemorySize(INT32_MAX)) {
    return sentence("batch * num_heads * tiles of ", kQueryRows,
                    " queries is above 2^31 - 1, which a grid cannot hold");
  }
  return why_no_device();
}

// Tensors are [batch, rows, heads, columns].
Rows rows_of(const Tensor& t) {
  Rows rows{t.data, t.strides[0], t.strides[1], t.strides[2], t.strides[3]};
  const auto whole = [](int64_t stride, int64_t size) { return size <= 1 || stride % 8 == 0; };
  rows.in_pieces = (t.dims[3] <= 1 || rows.column == 1) && t.dims[3] % 8 == 0 && whole(rows.batch, t.dims[0]) &&
                   whole(rows.row, t.dims[1]) && whole(rows.head, t.dims[2]) &&
                   reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  return rows;
}

PerSequence per_sequence(const Tensor& t) {
  if (!t.given()) return {};
  return {t.data, t.strides[0], t.dtype == DType::kInt64};
}

ForwardProblem problem_of(const AttentionDesc& desc, const ForwardArgs& args) {
  ForwardProblem p;
  p.query = rows_of(args.query);
  p.key = rows_of(args.key);
  p.value = rows_of(args.value);
  p.out = rows_of(args.out);
  if (args.logsumexp.given()) {
    p.logsumexp = static_cast<float*>(args.logsumexp.data);
    p.logsumexp_batch = args.logsumexp.strides[0];
    p.logsumexp_head = args.logsumexp.strides[1];
    p.logsumexp_row = args.logsumexp.strides[2];
  }
  p.seqlens_q = per_sequence(args.seqlens_q);
  p.seqlens_k = per_sequence(args.seqlens_k);
  p.query_offsets = per_sequence(args.query_offsets);
  p.batch = desc.batch;
  p.heads = desc.num_heads;
  p.heads_kv = desc.num_heads_kv;
  p.seqlen_q = desc.seqlen_q;
  p.seqlen_k = desc.seqlen_k;
  p.head_dim = static_cast<int>(desc.head_dim);
  p.head_dim_v = static_cast<int>(desc.head_dim_v);
  p.scale = static_cast<float>(
      desc.head_dim == 0 ? 0 : desc.scale.value_or(1 / std::sqrt(static_cast<double>(desc.head_dim))));
  if (desc.has_query_offsets) {
    p.diagonal = Diagonal::kPerSequence;
  } else if (desc.query_offset) {
    p.offset = *desc.query_offset;
  } else if (desc.align == Align::kBottomRight) {
    p.diagonal = Diagonal::kBottomRight;
  }
  p.left = desc.window_left;
  p.right = desc.causal ? 0 : desc.window_right;
  return p;
}

// Lengths and offsets lie on the device, where the kernel bounds them: nobody waits for them here.
Status forward(const AttentionDesc& desc, const ForwardArgs& args, const Run& run) {
  if (num_blocks(desc) == MemorySize(0)) return {};
  const ForwardProblem problem = problem_of(desc, args);
  const auto stream = static_cast<cudaStream_t>(run.stream);
  const cudaError_t error = desc.dtype == DType::kBFloat16 ? launch_forward_bfloat16(problem, stream)
                                                           : launch_forward_float16(problem, stream);
  if (error == cudaSuccess) return {};
  return {StatusCode::kInternal, sentence("CUDA refused to launch the kernel: ", cudaGetErrorString(error))};
}

Status backward(const AttentionDesc&, const BackwardArgs&, const Run&) {
  return {StatusCode::kUnsupported, "cuda_sm80 computes no gradients"};
}

}  // namespace
}  // namespace cuda

const Kernel kCudaSm80 = {
    "cuda_sm80",
    Device::kCuda,
    cuda::why_not,
    [](const AttentionDesc&, int) { return MemorySize(0); },
    [](const AttentionDesc&, int) { return MemorySize(0); },
    cuda::forward,
    cuda::backward,
};

}  // namespace polyhead
