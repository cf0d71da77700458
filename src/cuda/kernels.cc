// What of a desc the CUDA kernels take, and how a call's tensors are told to them.
#include "cuda/kernels.h"

#include <cmath>

#include "core/sentence.h"
#include "cuda/problem.h"

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

// Of a desc what these kernels take: what is added to descs is refused until somebody adds it here.
AttentionDesc taken_of(const AttentionDesc& desc) {
  AttentionDesc taken;
  taken.batch = desc.batch;
  taken.seqlen_q = desc.seqlen_q;
  taken.seqlen_k = desc.seqlen_k;
  taken.num_heads = desc.num_heads;
  taken.num_heads_kv = desc.num_heads_kv;
  taken.head_dim = desc.head_dim;
  taken.head_dim_v = desc.head_dim_v;
  taken.dtype = desc.dtype;
  taken.out_dtype = desc.out_dtype;
  taken.grad_dtype = desc.grad_dtype;
  taken.has_seqlens_q = desc.has_seqlens_q;
  taken.has_seqlens_k = desc.has_seqlens_k;
  taken.scale = desc.scale;
  taken.causal = desc.causal;
  taken.window_left = desc.window_left;
  taken.window_right = desc.window_right;
  taken.align = desc.align;
  taken.query_offset = desc.query_offset;
  taken.has_query_offsets = desc.has_query_offsets;
  taken.attn_mask = desc.attn_mask;  // not given
  taken.attn_bias = desc.attn_bias;
  taken.dropout_origin = desc.dropout_origin;  // unused
  return taken;
}

std::string option_refused(const AttentionDesc& desc) {
  struct Option {
    bool given;
    const char* name;
  };
  const Option options[] = {{desc.packed, "packed"},
                            {desc.page_size > 0, "page_size"},
                            {desc.softcap != 0, "softcap"},
                            {desc.has_windows, "windows of each query"},
                            {desc.attn_mask.given, "attn_mask"},
                            {desc.attn_bias.given, "attn_bias"},
                            {desc.alibi_slopes_ndim > 0, "alibi_slopes"},
                            {desc.has_sink_logits, "sink_logits"},
                            {desc.dropout_p > 0, "dropout"},
                            {desc.return_weights != ReturnWeights::kNone, "return_weights"},
                            {desc.return_column_sums, "return_column_sums"},
                            {desc.program != nullptr, "a program"},
                            {desc.normalizer != Normalizer::kSoftmax, "a normalizer other than softmax"}};
  for (const auto& [given, name] : options) {
    if (given) return sentence(name, " is given, which this kernel does not compute");
  }
  return desc == taken_of(desc) ? "" : "an option is given that this kernel does not compute";
}

// Blocks of threads in a grid that goes over queries, and over keys; too many if there are more than a grid may have.
MemorySize query_blocks(const AttentionDesc& desc) {
  return MemorySize(desc.batch) * MemorySize(desc.num_heads) * MemorySize(pieces(desc.seqlen_q, kBlockRows));
}
MemorySize key_blocks(const AttentionDesc& desc) {
  return MemorySize(desc.batch) * MemorySize(desc.num_heads_kv) * MemorySize(pieces(desc.seqlen_k, kBlockRows));
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
  for (const auto& [blocks, what] : {std::pair(query_blocks(desc), "batch * num_heads * tiles of 64 queries"),
                                     std::pair(key_blocks(desc), "batch * num_heads_kv * tiles of 64 keys")}) {
    if (blocks > MemorySize(INT32_MAX)) return sentence(what, " is above 2^31 - 1, which a grid cannot hold");
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

Gradient gradient_of(const Tensor& t) { return {rows_of(t), t.dtype == DType::kFloat32}; }

Statistic statistic_of(const Tensor& t) {
  return {static_cast<float*>(t.data), t.strides[0], t.strides[1], t.strides[2]};
}

PerSequence per_sequence(const Tensor& t) {
  if (!t.given()) return {};
  return {t.data, t.strides[0], t.dtype == DType::kInt64};
}

void set_problem(const AttentionDesc& desc, const ForwardArgs& args, Problem* p) {
  p->query = rows_of(args.query);
  p->key = rows_of(args.key);
  p->value = rows_of(args.value);
  p->out = rows_of(args.out);
  p->logsumexp = statistic_of(args.logsumexp);
  p->seqlens_q = per_sequence(args.seqlens_q);
  p->seqlens_k = per_sequence(args.seqlens_k);
  p->query_offsets = per_sequence(args.query_offsets);
  p->batch = desc.batch;
  p->heads = desc.num_heads;
  p->heads_kv = desc.num_heads_kv;
  p->seqlen_q = desc.seqlen_q;
  p->seqlen_k = desc.seqlen_k;
  p->head_dim = static_cast<int>(desc.head_dim);
  p->head_dim_v = static_cast<int>(desc.head_dim_v);
  p->scale = static_cast<float>(
      desc.head_dim == 0 ? 0 : desc.scale.value_or(1 / std::sqrt(static_cast<double>(desc.head_dim))));
  if (desc.has_query_offsets) {
    p->diagonal = Diagonal::kPerSequence;
  } else if (desc.query_offset) {
    p->offset = *desc.query_offset;
  } else if (desc.align == Align::kBottomRight) {
    p->diagonal = Diagonal::kBottomRight;
  }
  p->left = desc.window_left;
  p->right = desc.causal ? 0 : desc.window_right;
}

Status launched(cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {StatusCode::kInternal, sentence("CUDA refused to launch the kernel: ", cudaGetErrorString(error))};
}

// Lengths and offsets lie on the device, where the kernels bound them: nobody waits for them here.
Status forward(const AttentionDesc& desc, const ForwardArgs& args, const Run& run) {
  if (query_blocks(desc) == MemorySize(0)) return {};
  Problem problem;
  set_problem(desc, args, &problem);
  const auto stream = static_cast<cudaStream_t>(run.stream);
  return launched(desc.dtype == DType::kBFloat16 ? launch_forward_bfloat16(problem, stream)
                                                 : launch_forward_float16(problem, stream));
}

// delta [batch, num_heads, seqlen_q]
MemorySize backward_workspace_bytes(const AttentionDesc& desc, int) {
  const MemorySize bytes =
      MemorySize(4) * MemorySize(desc.batch) * MemorySize(desc.num_heads) * MemorySize(desc.seqlen_q);
  return bytes.rounded_up(64);
}

Status backward(const AttentionDesc& desc, const BackwardArgs& args, const Run& run) {
  BackwardProblem problem;
  set_problem(desc, args.forward, &problem);
  problem.grad_out = rows_of(args.grad_out);
  problem.grad_logsumexp = statistic_of(args.grad_logsumexp);
  problem.given_delta = statistic_of(args.delta);
  problem.delta = {static_cast<float*>(args.forward.workspace), desc.num_heads * desc.seqlen_q, desc.seqlen_q, 1};
  problem.grad_query = gradient_of(args.grad_query);
  problem.grad_key = gradient_of(args.grad_key);
  problem.grad_value = gradient_of(args.grad_value);
  problem.accumulate = args.accumulate;
  const auto stream = static_cast<cudaStream_t>(run.stream);
  return launched(desc.dtype == DType::kBFloat16 ? launch_backward_bfloat16(problem, stream)
                                                 : launch_backward_float16(problem, stream));
}

}  // namespace
}  // namespace cuda

const Kernel kCudaSm80 = {
    "cuda_sm80",
    Device::kCuda,
    cuda::why_not,
    [](const AttentionDesc&, int) { return MemorySize(0); },
    cuda::backward_workspace_bytes,
    cuda::forward,
    cuda::backward,
};

}  // namespace polyhead
