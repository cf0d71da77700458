// What of a desc the CUDA kernels take, and how a call's tensors are told to them.
#include "cuda/kernels.h"

#include <algorithm>
#include <cmath>

#include "core/sentence.h"
#include "cuda/call.h"
#include "cuda/machine.h"
#include "cuda/nvrtc.h"
#include "cuda/program_kernels.h"
#include "cuda/sums.h"

namespace polyhead {
namespace cuda {
namespace {

// What forward computes with: stored numbers times their scales are float32.
DType forward_dtype(const AttentionDesc& desc) { return is_stored(desc) ? DType::kFloat32 : desc.dtype; }
// What backward computes with: a float32 grad_out is not rounded to 16 bits.
DType backward_dtype(const AttentionDesc& desc) { return out_dtype(desc); }

bool sums_pairs(const AttentionDesc& desc) {
  return desc.return_weights != ReturnWeights::kNone || desc.return_column_sums;
}

// Why it cannot run the kernels of pairs in `dtype`, though it can run forward's: backward's, and what sums weights.
std::string why_no_pairs(const AttentionDesc& desc, DType dtype, const char* what) {
  const int narrow = dtype == DType::kFloat32 ? 64 : 128;
  const int64_t columns = std::max(desc.head_dim, desc.head_dim_v);
  const bool in_slices = columns > kMostTileColumns && dtype != DType::kFloat32;
  if (columns <= narrow || in_slices) return "";
  const Result<int> shared = shared_bytes_of_block();
  if (!shared.ok()) return shared.status().message();
  if (*shared >= kWideBytes) return "";
  return sentence(what, " of ", dtype_name(dtype), " with head dims above ", narrow, " needs ", kWideBytes,
                  " bytes of shared memory, the GPU has ", *shared);
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
  taken.key_dtype = desc.key_dtype;
  taken.value_dtype = desc.value_dtype;
  taken.key_group = desc.key_group;
  taken.value_group = desc.value_group;
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
  taken.mask_at_end = desc.mask_at_end;
  taken.attn_bias = desc.attn_bias;
  taken.alibi_slopes_ndim = desc.alibi_slopes_ndim;
  taken.has_sink_logits = desc.has_sink_logits;
  taken.normalizer = desc.normalizer;
  taken.dropout_p = desc.dropout_p;
  taken.dropout_origin = desc.dropout_origin;
  taken.program = desc.program;
  taken.captures = desc.captures;
  taken.return_weights = desc.return_weights;
  taken.return_column_sums = desc.return_column_sums;
  return taken;
}

std::string option_refused(const AttentionDesc& desc) {
  return desc == taken_of(desc) ? "" : "an option is given that this kernel does not compute";
}

// Tiles of pairs, where something is summed over them.
MemorySize pair_tiles(const AttentionDesc& desc) {
  if (!desc.attn_bias.given && desc.alibi_slopes_ndim == 0 && !sums_pairs(desc)) return 0;
  return query_blocks(desc) * MemorySize(pieces(desc.seqlen_k, kBlockRows));
}

std::string why_not(const AttentionDesc& desc) {
  if (desc.dtype == DType::kFloat64) {
    return sentence("dtype is ", dtype_name(desc.dtype), ", takes float32, bfloat16 or float16");
  }
  for (const std::string& reason :
       {size_taken("head_dim", desc.head_dim), size_taken("head_dim_v", desc.head_dim_v), option_refused(desc)}) {
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
  if (std::string reason = why_no_device(); !reason.empty()) return reason;
  if (desc.program != nullptr) {
    if (std::string reason = why_no_compiler(); !reason.empty()) return reason;
  }
  return sums_pairs(desc) && !is_stored(desc) ? why_no_pairs(desc, desc.dtype, "returning weights") : "";
}

// A program is compiled when a plan is made: what forward needs of it.
Status prepare(const AttentionDesc& desc) { return forward_kernels(desc, number_of(forward_dtype(desc))).status(); }

Status launched(cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {StatusCode::kInternal, sentence("CUDA refused to launch the kernel: ", cudaGetErrorString(error))};
}

// Packed: on average.
int64_t queries_of_sequence(const AttentionDesc& desc) {
  return pieces(desc.seqlen_q, desc.packed ? std::max<int64_t>(desc.batch, 1) : 1);
}

// Query heads whose queries share a tile: all of a group, where they are as few as in decoding (of packed sequences on
// average, and one of more has more tiles) and what is done to scores does not differ by head.
int64_t tile_heads(const AttentionDesc& desc) {
  const int64_t group = desc.num_heads_kv == 0 ? 1 : desc.num_heads / desc.num_heads_kv;
  const auto by_head = [](const BroadcastOperand& x) { return x.given && x.dims[1] != 1; };
  if (group > kBlockRows || queries_of_sequence(desc) > kBlockRows / std::max<int64_t>(group, 1)) return 1;
  if (by_head(desc.attn_mask) || by_head(desc.attn_bias) || desc.alibi_slopes_ndim > 0 || desc.dropout_p > 0) return 1;
  return desc.program == nullptr ? std::max<int64_t>(group, 1) : 1;
}

// Blocks of threads that own queries in forward, where so many heads share a tile.
MemorySize shared_blocks(const AttentionDesc& desc, int64_t heads) {
  return query_blocks(desc, kBlockRows / heads).value() / static_cast<uint64_t>(heads);
}

// Blocks of threads that share the keys of 64 queries: enough for every GPU, where there are keys enough for each. A
// sequence of a batch has as many as it has alone, so that it has the same bits. Of many queries, whose parts take long to be
// merged, only where blocks of 128 would leave most of a GPU idle.
int64_t parts(const AttentionDesc& desc) {
  constexpr int64_t kBlocks = 512, kFewWideBlocks = 32, kWideBlocks = 132;
  AttentionDesc alone = desc;
  if (!desc.packed) alone.batch = 1;
  const bool few = queries_of_sequence(desc) <= kBlockRows;
  const auto blocks = static_cast<int64_t>(
      (few ? shared_blocks(alone, tile_heads(desc)) : query_blocks(alone, 2 * kBlockRows)).value());
  if (blocks == 0 || (!few && blocks > kFewWideBlocks)) return 1;
  const int64_t most = std::max<int64_t>(pieces(desc.seqlen_k, kLeastKeysOfPart), 1);
  return std::clamp<int64_t>((few ? kBlocks : kWideBlocks) / blocks, 1, most);
}

// Whether rows are so short that kernels for such take them, and keys so few that a tile's are ints.
bool is_short_enough(const AttentionDesc& desc, const Problem& problem) {
  if (is_stored(desc) || desc.seqlen_k > INT32_MAX - 2 * kBlockRows) return false;
  return std::max(problem.head_dim, problem.head_dim_v) <= kMostWideColumns;
}

// Whether scores are nothing but products besides.
bool is_plain(const AttentionDesc& desc, const Problem& problem) {
  return !problem.has_options && is_short_enough(desc, problem);
}

// Whether queries are many besides: kernels for that take fewer instructions for a pair.
bool is_wide(const AttentionDesc& desc, const Problem& problem) {
  if (!is_plain(desc, problem) || problem.parts > 1 || problem.tile_heads > 1 || desc.seqlen_q <= kBlockRows)
    return false;
  if (std::max(problem.head_dim, problem.head_dim_v) <= 64 || problem.elements != Number::kFloat32) return true;
  return problem.key.in_pieces && problem.value.in_pieces && desc.page_size == 0;
}

// Whether options are none, or such as kernels by warpgroups take.
bool takes_options(const AttentionDesc& desc, const Problem& problem) {
  const bool sinks_before_window = problem.sink_keys > 0 && problem.left >= 0;
  return problem.softmax && desc.program == nullptr && !desc.has_windows && !sinks_before_window;
}

// Blocks of warpgroups, where they compute it: on 9.0. Their rows have other bits, so what is computed by them must not depend
// on what is beside a sequence; of packed ones each is asked on the device how long it is.
MemorySize group_blocks(const AttentionDesc& desc, const Problem& problem) {
  constexpr int64_t kRows = kForwardGroups * kBlockRows;
  if (!is_short_enough(desc, problem) || !takes_options(desc, problem)) return 0;
  if (problem.elements == Number::kFloat32 || !std::isfinite(problem.scale)) return 0;
  if (desc.seqlen_q <= kBlockRows || !has_warpgroup_products()) return 0;
  if (!desc.packed) return parts(desc) > 1 ? 0 : query_blocks(desc, kRows);
  const int64_t most_long = std::min(desc.batch, desc.seqlen_q / (kBlockRows + 1));  // see OwnRows
  return MemorySize(desc.num_heads) * MemorySize(desc.seqlen_q / kRows + most_long + 1);
}

// How the blocks of threads of forward share queries and keys.
void set_blocks(const AttentionDesc& desc, Problem* p) {
  p->group_blocks = static_cast<unsigned>(group_blocks(desc, *p).value());
  const bool beside_groups = p->group_blocks > 0, few = queries_of_sequence(desc) <= kBlockRows;
  p->parts = beside_groups && !few ? 1 : parts(desc);
  p->tile_heads = tile_heads(desc);
  p->wide = !beside_groups && is_wide(desc, *p);
  MemorySize blocks = shared_blocks(desc, p->tile_heads);
  if (p->wide) {
    blocks = query_blocks(desc, wide_rows(p->elements, tile_columns(std::max(p->head_dim, p->head_dim_v))));
  } else if (beside_groups && p->tile_heads == 1) {
    blocks = MemorySize(desc.num_heads) * MemorySize(desc.batch + 1);  // of short sequences, see OwnRows
  }
  p->query_blocks = static_cast<unsigned>(blocks.value());
}

// Whether backward is of float32 and has scores that are nothing but products, so many that a tile's index is an int.
bool is_wide_backward(const AttentionDesc& desc, const BackwardProblem& problem) {
  const int columns = std::max(problem.head_dim, problem.head_dim_v);
  if (problem.elements != Number::kFloat32 || problem.has_options || columns > kMostWideColumns) return false;
  if (std::max(desc.seqlen_q, desc.seqlen_k) > INT32_MAX - 2 * kBlockRows) return false;
  return key_blocks(desc, wide_backward_keys(columns)) <= MemorySize(INT32_MAX);
}

// Blocks of warpgroups in backward, where they compute it.
void set_backward_groups(const AttentionDesc& desc, BackwardProblem* p) {
  constexpr int64_t kMostQueries = 1 << 24;  // a group's tiles of them are counted by an int
  if (!is_short_enough(desc, *p) || !takes_options(desc, *p) || desc.seqlen_q > kMostQueries) return;
  if (p->elements == Number::kFloat32 || p->exact || !has_warpgroup_products()) return;
  const int columns = tile_columns(std::max(p->head_dim, p->head_dim_v));
  const auto rows = [&](bool keys) { return backward_groups(p->elements, columns, keys) * kBlockRows; };
  p->group_query_blocks = static_cast<unsigned>(query_blocks(desc, rows(false)).value());
  p->group_key_blocks = static_cast<unsigned>(key_blocks(desc, rows(true)).value());
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
MemorySize part_bytes(const AttentionDesc& desc) {
  const MemorySize sums = part_rows(desc) * MemorySize(desc.head_dim_v) * MemorySize(sizeof(float));
  return part_statistics_bytes(desc) + sums.rounded_up(64);
}

// [batch, num_heads, seqlen_q]; packed: [num_heads, total_q]
MemorySize statistic_bytes(const AttentionDesc& desc) {
  const MemorySize rows = MemorySize(desc.packed ? 1 : desc.batch) * MemorySize(desc.seqlen_q);
  return (MemorySize(4) * MemorySize(desc.num_heads) * rows).rounded_up(64);
}
Statistic statistic_at(const AttentionDesc& desc, void* workspace) {
  return {static_cast<float*>(workspace), desc.packed ? 0 : desc.num_heads * desc.seqlen_q, desc.seqlen_q, 1};
}

// The logsumexp, then parts of sums, both for what is summed over pairs; they lie behind the parts of rows.
MemorySize workspace_bytes(const AttentionDesc& desc, int) {
  if (!sums_pairs(desc)) return part_bytes(desc);
  return part_bytes(desc) + statistic_bytes(desc) + partial_bytes(weight_cuts(desc));
}
MemorySize backward_workspace_bytes(const AttentionDesc& desc, int) {
  return statistic_bytes(desc) + std::max(partial_bytes(gradient_cuts(desc)), capture_bytes(desc).rounded_up(64));
}

Status return_weights(const AttentionDesc& desc, const ForwardArgs& args, const StoredProblem& forward,
                      const ProgramKernels& of_program, char* partial, cudaStream_t stream) {
  StoredWeightsProblem problem;
  static_cast<Problem&>(problem) = forward;
  problem.stored_key = forward.stored_key;
  problem.tile_heads = 1;
  const Cuts cuts = weight_cuts(desc);
  set_sums(cuts.sums[0], weights_of(args.attn_weights), partial, &problem.sums[0]);
  set_sums(cuts.sums[1], column_sums_of(args.column_sums), partial, &problem.sums[1]);
  return launched(is_stored(desc) ? launch_stored_weights(problem, of_program, stream)
                                  : launch_pair_sums(problem, of_program, stream));
}

// Lengths, offsets and page tables lie on the device, where the kernels bound them: nobody waits for them here.
Status forward(const AttentionDesc& desc, const ForwardArgs& args, const Run& run) {
  if (Status status = check_place(desc, args, workspace_bytes(desc, 1).value(), run.stream); !status.ok())
    return status;
  StoredProblem problem;
  set_problem(desc, args, forward_dtype(desc), &problem);
  if (is_stored(desc)) set_stored(desc, args, &problem);
  set_blocks(desc, &problem);
  auto* memory = static_cast<char*>(args.workspace);
  problem.part_statistics = reinterpret_cast<float*>(memory);
  problem.part_sums = problem.part_statistics + part_statistics_bytes(desc).value() / sizeof(float);
  memory += part_bytes(desc).value();
  if (sums_pairs(desc) && problem.softmax && problem.logsumexp.data == nullptr) {
    problem.logsumexp = statistic_at(desc, memory);
  }
  const auto stream = static_cast<cudaStream_t>(run.stream);
  const Result<ProgramKernels> of_program = forward_kernels(desc, problem.elements);
  if (!of_program.ok()) return of_program.status();
  if (problem.query_blocks > 0) {
    const cudaError_t error = is_stored(desc) ? launch_forward_stored(problem, *of_program, stream)
                                              : launch_forward(problem, *of_program, stream);
    if (Status status = launched(error); !status.ok()) return status;
  }
  if (!sums_pairs(desc)) return {};
  return return_weights(desc, args, problem, *of_program, memory + statistic_bytes(desc).value(), stream);
}

// Behind delta: parts of sums, and then the sums of captures.
char* sums_memory(const AttentionDesc& desc, const BackwardArgs& args) {
  return static_cast<char*>(args.forward.workspace) + statistic_bytes(desc).value();
}

void set_gradients_of_options(const AttentionDesc& desc, const BackwardArgs& args, BackwardProblem* p) {
  char* const partial = sums_memory(desc, args);
  const Cuts cuts = gradient_cuts(desc);
  set_sums(cuts.sums[0], broadcast_of(args.grad_attn_bias), partial, &p->sums[0]);
  set_sums(cuts.sums[1], slopes_of(args.grad_alibi_slopes), partial, &p->sums[1]);
  p->grad_sinks = static_cast<float*>(args.grad_sink_logits.data);
  p->grad_sinks_stride = args.grad_sink_logits.strides[0];
}

Status backward(const AttentionDesc& desc, const BackwardArgs& args, const Run& run) {
  const DType dtype = backward_dtype(desc);
  const size_t bytes = backward_workspace_bytes(desc, 1).value();
  if (Status status = check_place(desc, args, bytes, run.stream); !status.ok()) return status;
  BackwardProblem problem;
  set_problem(desc, args.forward, dtype, &problem);
  problem.wide = is_wide_backward(desc, problem);
  if (problem.wide) {
    const int keys = wide_backward_keys(std::max(problem.head_dim, problem.head_dim_v));
    problem.key_blocks = static_cast<unsigned>(key_blocks(desc, keys).value());
  } else if (std::string reason = why_no_pairs(desc, dtype, "backward"); !reason.empty()) {
    return {StatusCode::kUnsupported, reason};
  }
  problem.grad_out = rows_of(args.grad_out, problem.elements);
  problem.grad_logsumexp = statistic_of(args.grad_logsumexp);
  problem.given_delta = statistic_of(args.delta);
  if (problem.softmax) problem.delta = statistic_at(desc, args.forward.workspace);
  problem.grad_query = rows_of(args.grad_query, problem.elements);
  problem.grad_key = rows_of(args.grad_key, problem.elements);
  problem.grad_value = rows_of(args.grad_value, problem.elements);
  problem.exact = grad_dtype(desc) != desc.dtype || (!problem.softmax && dtype == DType::kFloat16);
  problem.accumulate = args.accumulate;
  set_backward_groups(desc, &problem);
  set_gradients_of_options(desc, args, &problem);
  const CaptureSums captures = capture_sums(desc, args, sums_memory(desc, args));
  const Result<ProgramKernels> of_program = backward_kernels(desc, problem, captures);
  if (!of_program.ok()) return of_program.status();
  const auto stream = static_cast<cudaStream_t>(run.stream);
  cudaError_t error = launch_backward(problem, *of_program, stream);
  if (error == cudaSuccess) error = launch_pair_sums(problem, *of_program, stream);
  if (error == cudaSuccess) error = launch_capture_gradients(problem, captures, *of_program, stream);
  return launched(error);
}

}  // namespace
}  // namespace cuda

const Kernel kCudaSm80 = {
    "cuda_sm80",   Device::kCuda,  cuda::why_not, cuda::workspace_bytes, cuda::backward_workspace_bytes,
    cuda::forward, cuda::backward, cuda::prepare,
};

}  // namespace polyhead
