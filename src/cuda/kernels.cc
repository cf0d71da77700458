// What of a desc the CUDA kernels take, and how a call's tensors are told to them.
#include "cuda/kernels.h"

#include <algorithm>
#include <cmath>

#include "core/dropout.h"
#include "core/philox.h"
#include "core/sentence.h"
#include "cuda/problem.h"

namespace polyhead {
namespace cuda {
namespace {

// Of the calling thread's current device.
cudaError_t ask_device(cudaDeviceAttr attribute, int* value) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  if (error != cudaSuccess)
    static_cast<void>(cudaGetLastError());  // the caller's next question is not answered with it
  return error;
}

// Why it cannot run the kernels; "" if it can.
std::string why_no_device() {
  int major = 0;
  const cudaError_t error = ask_device(cudaDevAttrComputeCapabilityMajor, &major);
  if (error != cudaSuccess) return sentence("no CUDA device can be used here: ", cudaGetErrorString(error));
  return major < 8 ? sentence("the GPU's compute capability is ", major, ", takes 8 and up") : "";
}

// Why it cannot run those of backward, though it can run forward's.
std::string why_no_backward(const AttentionDesc& desc) {
  const int narrow = desc.dtype == DType::kFloat32 ? 64 : 128;
  if (std::max(desc.head_dim, desc.head_dim_v) <= narrow) return "";
  int shared = 0;
  const cudaError_t error = ask_device(cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared);
  if (error != cudaSuccess) return sentence("no CUDA device can be used here: ", cudaGetErrorString(error));
  if (shared >= kWideBytes) return "";
  return sentence("backward of ", dtype_name(desc.dtype), " with head dims above ", narrow, " needs ", kWideBytes,
                  " bytes of shared memory, the GPU has ", shared);
}

std::string size_taken(const char* name, int64_t size, DType dtype) {
  const int most = dtype == DType::kFloat32 ? kMostHeadDimFloat32 : kMostHeadDim;
  return size <= most ? "" : sentence(name, " is ", size, ", takes 0 to ", most, " in ", dtype_name(dtype));
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
  taken.key_dtype = desc.key_dtype;  // the query's
  taken.value_dtype = desc.value_dtype;
  taken.page_size = desc.page_size;
  taken.num_pages = desc.num_pages;
  taken.packed = desc.packed;
  taken.has_seqlens_q = desc.has_seqlens_q;
  taken.has_seqlens_k = desc.has_seqlens_k;
  taken.scale = desc.scale;
  taken.causal = desc.causal;
  taken.window_left = desc.window_left;
  taken.window_right = desc.window_right;
  taken.align = desc.align;
  taken.has_windows = desc.has_windows;
  taken.sink_keys = desc.sink_keys;
  taken.query_offset = desc.query_offset;
  taken.has_query_offsets = desc.has_query_offsets;
  taken.softcap = desc.softcap;
  taken.attn_mask = desc.attn_mask;
  taken.attn_bias = desc.attn_bias;
  taken.alibi_slopes_ndim = desc.alibi_slopes_ndim;
  taken.has_sink_logits = desc.has_sink_logits;
  taken.dropout_p = desc.dropout_p;
  taken.dropout_origin = desc.dropout_origin;
  return taken;
}

std::string option_refused(const AttentionDesc& desc) {
  struct Option {
    bool given;
    const char* name;
  };
  const Option options[] = {{key_dtype(desc) != desc.dtype, "a key_dtype other than the query's"},
                            {value_dtype(desc) != desc.dtype, "a value_dtype other than the query's"},
                            {desc.mask_at_end, "mask_at_end"},
                            {desc.return_weights != ReturnWeights::kNone, "return_weights"},
                            {desc.return_column_sums, "return_column_sums"},
                            {desc.program != nullptr, "a program"},
                            {desc.normalizer != Normalizer::kSoftmax, "a normalizer other than softmax"}};
  for (const auto& [given, name] : options) {
    if (given) return sentence(name, " is given, which this kernel does not compute");
  }
  return desc == taken_of(desc) ? "" : "an option is given that this kernel does not compute";
}

// Blocks of threads that own the rows of a head in all sequences. Packed: one and a part for each sequence, see OwnRows.
MemorySize row_blocks(const AttentionDesc& desc, int64_t rows) {
  if (desc.packed) return MemorySize(rows / kBlockRows) + MemorySize(desc.batch) + 1;
  return MemorySize(desc.batch) * MemorySize(pieces(rows, kBlockRows));
}

// Blocks of threads in a grid that goes over queries, and over keys; too many if there are more than a grid may have.
MemorySize query_blocks(const AttentionDesc& desc) {
  return MemorySize(desc.num_heads) * row_blocks(desc, desc.seqlen_q);
}
MemorySize key_blocks(const AttentionDesc& desc) {
  return MemorySize(desc.num_heads_kv) * row_blocks(desc, desc.seqlen_k);
}

// Tiles of pairs, where gradients are summed over them.
MemorySize pair_tiles(const AttentionDesc& desc) {
  if (!desc.attn_bias.given && desc.alibi_slopes_ndim == 0) return 0;
  return query_blocks(desc) * MemorySize(pieces(desc.seqlen_k, kBlockRows));
}

std::string why_not(const AttentionDesc& desc) {
  if (desc.dtype == DType::kFloat64) {
    return sentence("dtype is ", dtype_name(desc.dtype), ", takes float32, bfloat16 or float16");
  }
  if (out_dtype(desc) != desc.dtype) {
    return sentence("out_dtype is ", dtype_name(out_dtype(desc)), ", takes the query's dtype");
  }
  for (const std::string& reason : {size_taken("head_dim", desc.head_dim, desc.dtype),
                                    size_taken("head_dim_v", desc.head_dim_v, desc.dtype), option_refused(desc)}) {
    if (!reason.empty()) return reason;
  }
  for (const auto& [blocks, what] : {std::pair(query_blocks(desc), "batch * num_heads * tiles of 64 queries"),
                                     std::pair(key_blocks(desc), "batch * num_heads_kv * tiles of 64 keys"),
                                     std::pair(pair_tiles(desc), "batch * num_heads * tiles of 64 x 64 pairs")}) {
    if (blocks > MemorySize(INT32_MAX)) return sentence(what, " is above 2^31 - 1, which a grid cannot hold");
  }
  for (const auto& [size, name] : {std::pair(desc.page_size, "page_size"), std::pair(desc.num_pages, "num_pages")}) {
    if (size > INT32_MAX) return sentence(name, " is ", size, ", takes 0 to 2^31 - 1");
  }
  return why_no_device();
}

// Tensors are [batch, rows, heads, columns], or [rows, heads, columns].
Rows rows_of(const Tensor& t) {
  if (!t.given()) return {};
  const int last = t.ndim - 1;
  Rows rows{t.data, t.ndim == 4 ? t.strides[0] : 0, t.strides[last - 2], t.strides[last - 1], t.strides[last]};
  const int64_t piece = 16 / static_cast<int64_t>(dtype_size_bytes(t.dtype));
  const auto whole = [&](int64_t stride, int64_t size) { return size <= 1 || stride % piece == 0; };
  rows.in_pieces = (t.dims[last] <= 1 || rows.column == 1) && t.dims[last] % piece == 0 &&
                   whole(rows.batch, t.dims[0]) && whole(rows.row, t.dims[last - 2]) &&
                   whole(rows.head, t.dims[last - 1]) && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  return rows;
}

// [batch, heads, rows], or [heads, rows]
Statistic statistic_of(const Tensor& t) {
  if (!t.given()) return {};
  return {static_cast<float*>(t.data), t.ndim == 3 ? t.strides[0] : 0, t.strides[t.ndim - 2], t.strides[t.ndim - 1]};
}

Integers integers(const Tensor& t) {
  if (!t.given()) return {};
  return {t.data, t.strides[0], t.dtype == DType::kInt64};
}

Pages pages_of(const AttentionDesc& desc, const Tensor& table) {
  if (desc.page_size == 0) return {};
  return {table.data, table.strides[0], table.strides[1], table.dtype == DType::kInt64, desc.page_size, desc.num_pages};
}

Number number_of(DType dtype) {
  if (dtype == DType::kBFloat16) return Number::kBFloat16;
  return dtype == DType::kFloat16 ? Number::kFloat16 : Number::kFloat32;
}

// A mask or bias, [1 or batch, 1 or num_heads, 1 or seqlen_q, 1 or seqlen_k].
Broadcast broadcast_of(const Tensor& t) {
  if (!t.given()) return {};
  const auto stride = [&](int n) { return t.dims[n] == 1 ? 0 : t.strides[n]; };
  return {t.data, stride(0), stride(1), stride(2), stride(3), number_of(t.dtype)};
}

// [num_heads], or [batch, num_heads]
Broadcast slopes_of(const Tensor& t) {
  if (!t.given()) return {};
  return {t.data, t.ndim == 2 ? t.strides[0] : 0, t.strides[t.ndim - 1]};
}

Dropout dropout_of(const AttentionDesc& desc, const ForwardArgs& args) {
  Dropout dropout;
  if (desc.dropout_p == 0) return dropout;
  const DropoutOrigin& origin = desc.dropout_origin;
  dropout.on = true;
  dropout.threshold = dropout_threshold(desc.dropout_p);
  dropout.offset = args.dropout_offset;
  dropout.first_head = static_cast<uint32_t>(origin.first_head);
  dropout.heads = static_cast<uint32_t>(counted_heads(origin, desc.num_heads));
  dropout.first_query = static_cast<uint32_t>(origin.first_query);
  dropout.first_key_group = static_cast<uint32_t>(origin.first_key / 8);
  dropout.seed = args.dropout_seed.value_or(0);
  dropout.factor = desc.dropout_p < 1 ? static_cast<float>(1 / (1 - desc.dropout_p)) : 0;
  return dropout;
}

void set_options(const AttentionDesc& desc, const ForwardArgs& args, Problem* p) {
  p->softcap = static_cast<float>(desc.softcap);
  p->mask = broadcast_of(args.attn_mask);
  p->bias = broadcast_of(args.attn_bias);
  p->slopes = slopes_of(args.alibi_slopes);
  p->sinks = static_cast<const float*>(args.sink_logits.data);
  p->sinks_stride = args.sink_logits.strides[0];
  p->dropout = dropout_of(desc, args);
  const bool sinks_before_window = p->sink_keys > 0 && p->left >= 0;
  p->hides_pairs =
      p->mask.data != nullptr || p->bias.data != nullptr || p->window_lo.data != nullptr || sinks_before_window;
  p->has_options =
      p->hides_pairs || p->softcap > 0 || p->slopes.data != nullptr || p->sinks != nullptr || p->dropout.on;
}

void set_problem(const AttentionDesc& desc, const ForwardArgs& args, Problem* p) {
  p->elements = number_of(desc.dtype);
  p->query = rows_of(args.query);
  p->key = rows_of(args.key);
  p->value = rows_of(args.value);
  p->out = rows_of(args.out);
  p->logsumexp = statistic_of(args.logsumexp);
  p->seqlens_q = integers(args.seqlens_q);
  p->seqlens_k = integers(args.seqlens_k);
  p->query_offsets = integers(args.query_offsets);
  p->packed = desc.packed;
  p->cu_seqlens_q = integers(args.cu_seqlens_q);
  p->cu_seqlens_k = integers(args.cu_seqlens_k);
  p->pages = pages_of(desc, args.page_table);
  p->batch = desc.batch;
  p->heads = desc.num_heads;
  p->heads_kv = desc.num_heads_kv;
  p->seqlen_q = desc.seqlen_q;
  p->seqlen_k = desc.seqlen_k;
  p->query_blocks = static_cast<unsigned>(query_blocks(desc).value());
  p->key_blocks = static_cast<unsigned>(key_blocks(desc).value());
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
  p->window_lo = integers(args.window_lo);
  p->window_hi = integers(args.window_hi);
  p->sink_keys = desc.sink_keys;
  set_options(desc, args, p);
}

Status launched(cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {StatusCode::kInternal, sentence("CUDA refused to launch the kernel: ", cudaGetErrorString(error))};
}

// Blocks of threads that share the keys of 64 queries: enough for every GPU, where there are keys enough for each. A
// sequence of a batch has as many as it has alone, so that it has the same bits.
int64_t parts(const AttentionDesc& desc) {
  constexpr int64_t kBlocks = 512;
  AttentionDesc alone = desc;
  if (!desc.packed) alone.batch = 1;
  const auto blocks = static_cast<int64_t>(query_blocks(alone).value());
  if (blocks == 0) return 1;
  return std::clamp<int64_t>(kBlocks / blocks, 1, std::max<int64_t>(pieces(desc.seqlen_k, kLeastKeysOfPart), 1));
}

// [batch, num_heads, seqlen_q, parts]; packed: [num_heads, total_q, parts]
MemorySize part_rows(const AttentionDesc& desc) {
  const int64_t n = parts(desc);
  if (n == 1) return 0;
  return MemorySize(desc.packed ? 1 : desc.batch) * MemorySize(desc.num_heads) * MemorySize(desc.seqlen_q) * n;
}
MemorySize part_statistics_bytes(const AttentionDesc& desc) {
  return (part_rows(desc) * MemorySize(4 * sizeof(float))).rounded_up(64);
}
MemorySize workspace_bytes(const AttentionDesc& desc, int) {
  const MemorySize sums = part_rows(desc) * MemorySize(desc.head_dim_v) * MemorySize(sizeof(float));
  return part_statistics_bytes(desc) + sums.rounded_up(64);
}

// Lengths, offsets and page tables lie on the device, where the kernels bound them: nobody waits for them here.
Status forward(const AttentionDesc& desc, const ForwardArgs& args, const Run& run) {
  if (query_blocks(desc) == MemorySize(0)) return {};
  Problem problem;
  set_problem(desc, args, &problem);
  problem.parts = parts(desc);
  problem.part_statistics = static_cast<float*>(args.workspace);
  problem.part_sums = problem.part_statistics + part_statistics_bytes(desc).value() / sizeof(float);
  const auto stream = static_cast<cudaStream_t>(run.stream);
  return launched(launch_forward(problem, stream));
}

// [batch, num_heads, seqlen_q]; packed: [num_heads, total_q]
MemorySize delta_bytes(const AttentionDesc& desc) {
  const MemorySize rows = MemorySize(desc.packed ? 1 : desc.batch) * MemorySize(desc.seqlen_q);
  return (MemorySize(4) * MemorySize(desc.num_heads) * rows).rounded_up(64);
}

// How the sums of a gradient are cut that is [1 or batch, 1 or num_heads, 1 or seqlen_q, 1 or seqlen_k].
PairSums pair_sums(const AttentionDesc& desc, const int64_t (&dims)[4]) {
  constexpr int64_t kBlocks = 512;  // enough for every GPU
  const int64_t all[4] = {desc.batch, desc.num_heads, pieces(desc.seqlen_q, kBlockRows),
                          pieces(desc.seqlen_k, kBlockRows)};
  PairSums sums;
  sums.by_query = dims[2] != 1;
  sums.by_key = dims[3] != 1;
  sums.tiles = sums.pairs = 1;
  for (int n = 0; n < 4; ++n) {
    sums.own[n] = dims[n] != 1 ? all[n] : 1;
    sums.summed[n] = dims[n] != 1 ? 1 : all[n];
    sums.tiles *= sums.own[n];
    sums.pairs *= sums.summed[n];
  }
  const int64_t of_sequence = sums.own[0] > 0 ? sums.tiles / sums.own[0] : 0;  // so that it has the same bits alone
  if (of_sequence > 0) {
    sums.parts = std::clamp<int64_t>(pieces(kBlocks, of_sequence), 1, std::max<int64_t>(sums.pairs, 1));
  }
  if (desc.packed && sums.own[0] == 1) sums.sequences = std::max<int64_t>(desc.batch, 1);
  sums.parts = pieces(sums.parts, sums.sequences) * sums.sequences;
  return sums;
}
PairSums bias_sums(const AttentionDesc& desc) {
  if (!desc.attn_bias.given) return {};
  return pair_sums(desc, desc.attn_bias.dims);
}
PairSums slope_sums(const AttentionDesc& desc) {
  if (desc.alibi_slopes_ndim == 0) return {};
  PairSums sums = pair_sums(desc, {desc.alibi_slopes_ndim == 2 ? desc.batch : 1, desc.num_heads, 1, 1});
  sums.by_distance = true;
  return sums;
}

// Both gradients take the same memory, one after the other.
MemorySize partial_bytes(const AttentionDesc& desc) {
  MemorySize most = 0;
  for (const PairSums& sums : {bias_sums(desc), slope_sums(desc)}) {
    if (sums.parts == 1) continue;
    most = std::max(most, MemorySize(4) * sums.parts * sums.tiles * sums.rows() * sums.columns());
  }
  return most.rounded_up(64);
}

MemorySize backward_workspace_bytes(const AttentionDesc& desc, int) { return delta_bytes(desc) + partial_bytes(desc); }

void set_sums(const PairSums& cut, const Broadcast& gradient, const AttentionDesc& desc, void* workspace,
              PairSums* sums) {
  if (gradient.data == nullptr) return;
  *sums = cut;
  sums->gradient = gradient;
  if (sums->parts == 1) return;
  sums->partial = reinterpret_cast<float*>(static_cast<char*>(workspace) + delta_bytes(desc).value());
}

void set_gradients_of_options(const AttentionDesc& desc, const BackwardArgs& args, BackwardProblem* p) {
  void* const workspace = args.forward.workspace;
  set_sums(bias_sums(desc), broadcast_of(args.grad_attn_bias), desc, workspace, &p->bias_sums);
  set_sums(slope_sums(desc), slopes_of(args.grad_alibi_slopes), desc, workspace, &p->slope_sums);
  p->grad_sinks = static_cast<float*>(args.grad_sink_logits.data);
  p->grad_sinks_stride = args.grad_sink_logits.strides[0];
}

Status backward(const AttentionDesc& desc, const BackwardArgs& args, const Run& run) {
  if (std::string reason = why_no_backward(desc); !reason.empty()) return {StatusCode::kUnsupported, reason};
  BackwardProblem problem;
  set_problem(desc, args.forward, &problem);
  problem.grad_out = rows_of(args.grad_out);
  problem.grad_logsumexp = statistic_of(args.grad_logsumexp);
  problem.given_delta = statistic_of(args.delta);
  problem.delta = {static_cast<float*>(args.forward.workspace), desc.packed ? 0 : desc.num_heads * desc.seqlen_q,
                   desc.seqlen_q, 1};
  problem.grad_query = rows_of(args.grad_query);
  problem.grad_key = rows_of(args.grad_key);
  problem.grad_value = rows_of(args.grad_value);
  problem.wide_gradients = grad_dtype(desc) != desc.dtype;
  problem.accumulate = args.accumulate;
  set_gradients_of_options(desc, args, &problem);
  const auto stream = static_cast<cudaStream_t>(run.stream);
  const Status status = launched(launch_backward(problem, stream));
  if (!status.ok()) return status;
  return launched(launch_score_gradients(problem, stream));
}

}  // namespace
}  // namespace cuda

const Kernel kCudaSm80 = {
    "cuda_sm80",   Device::kCuda,  cuda::why_not, cuda::workspace_bytes, cuda::backward_workspace_bytes,
    cuda::forward, cuda::backward,
};

}  // namespace polyhead
