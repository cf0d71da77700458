// Scaled dot-product attention:
//   S = scale * Q K^T                              [batch, num_heads, seqlen_q, seqlen_k]   never stored
//   S = softcap * tanh(S / softcap)                if softcap > 0
//   S = S + bias - slope * |i + offset - j|        attn_bias, ALiBi
//   S = program(S)                                 a score program (polyhead/program.h)
//   S = -inf where hidden                          visible = mask AND causal AND windows AND lengths AND bias > -inf
//                                                            AND the program's mask AND its score > -inf
//   L = log (sum_k exp(S) + exp(sink))             [batch, num_heads, seqlen_q]   logsumexp, natural log; sink_logits,
//                                                                                 or no sink
//   P = exp(S - L)                                 or, with Normalizer::kNone, P = S where visible and 0 elsewhere, no L
//   O = dropout(P) V                               [batch, seqlen_q, num_heads, head_dim_v]
// A query that sees no key gets O = 0 and L = -inf, or the sink. Definition in code: src/reference/attention.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "polyhead/api.h"
#include "polyhead/dropout.h"
#include "polyhead/executor.h"
#include "polyhead/program.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead {

/// Where query i stands among the keys: at i + offset. Causal, window and ALiBi share this one diagonal.
enum class Align : int32_t {
  kUnset = 0,        ///< an error where it would matter (a sequence with seqlen_q != seqlen_k)
  kTopLeft = 1,      ///< offset 0                      (torch `is_causal`)
  kBottomRight = 2,  ///< offset seqlen_k - seqlen_q    (FlashAttention; decoding with a key cache)
};

/// What makes the weights P of a row out of its scores.
enum class Normalizer : int32_t {
  kSoftmax = 0,
  /// Nothing: P is the score, or 0 where the key is hidden. With a score program it is what that gives, as in sigmoid
  /// attention (arXiv:2409.04431); without one, attention is linear in the scores.
  kNone = 1,
};

/// What to return of the weights P (after dropout and its scale).
enum class ReturnWeights : int32_t {
  kNone = 0,
  kPerHead = 1,  ///< [batch, num_heads, seqlen_q, seqlen_k]
  kMean = 2,     ///< averaged over heads: [batch, seqlen_q, seqlen_k]
};

/// An operand that broadcasts to [batch, num_heads, seqlen_q, seqlen_k]: each of `dims` is 1 or the full size.
struct BroadcastOperand {
  bool given = false;
  DType dtype = DType::kFloat32;
  int64_t dims[4] = {1, 1, 1, 1};

  bool operator==(const BroadcastOperand&) const = default;
};

/// What a tensor that a program captures looks like.
struct CaptureShape {
  DType dtype = DType::kFloat32;  ///< a float dtype, int32 or int64, or bool, as the program says
  int ndim = 0;                   ///< as the program says; 1 where it says 0
  int64_t dims[ProgramStep::kMostOperands] = {};

  bool operator==(const CaptureShape&) const = default;
};

/// What to compute. Plain data; every field is checked once, when a plan is made.
struct AttentionDesc {
  int64_t batch = 1;     ///< sequences
  int64_t seqlen_q = 0;  ///< queries of a sequence; packed: rows of all sequences together
  int64_t seqlen_k = 0;  ///< keys of a sequence; packed: rows of all together; paged: as many as its pages hold
  int64_t num_heads = 1;
  int64_t num_heads_kv = 1;       ///< divides num_heads; query head h reads h / (num_heads / num_heads_kv)
  int64_t head_dim = 0;           ///< of query and key
  int64_t head_dim_v = 0;         ///< of value and out
  DType dtype = DType::kFloat32;  ///< of query, key and value: float32, bfloat16, float16, float64

  /// Of out and grad_out, and of grad_query, grad_key and grad_value; default: `dtype`. Beside bfloat16 and float16 each
  /// may be float32: the sums as they are before rounding, for parts that are merged and gradients that accumulate.
  std::optional<DType> out_dtype = {};
  std::optional<DType> grad_dtype = {};

  /// Of key and of value, each its own: dtype (default), or what a cache may be stored in, int8, float8_e4m3, float8_e5m2 or
  /// int4x2. Of the latter an element is the number that is stored times its scale: key_scales and value_scales come with
  /// each call, float32, with int4x2 float16. Forward only. polyhead/cache.h writes them.
  std::optional<DType> key_dtype = {};
  std::optional<DType> value_dtype = {};
  /// How many neighbours of a row share a scale: a multiple of 16 that divides head_dim (head_dim_v); 0: all of the row.
  int64_t key_group = 0;
  int64_t value_group = 0;

  bool packed = false;         ///< [rows, heads, dim] operands; cu_seqlens_q and cu_seqlens_k are given with each call
  bool has_seqlens_q = false;  ///< seqlens_q [batch] is given with each call (padding on the right); not when packed
  bool has_seqlens_k = false;  ///< seqlens_k [batch] likewise

  /// Keys of a page; 0: keys and values are not paged. Else they lie in a pool of num_pages pages, [num_pages, page_size,
  /// num_heads_kv, dim], and page_table [batch, seqlen_k / page_size], given with each call, tells which pages hold each
  /// sequence, in order: sequences may share pages, and what no length reaches is never read. seqlens_k is needed, seqlen_k
  /// is a multiple of page_size; packed queries then have cu_seqlens_q alone. Forward only. Results have the bits that the
  /// same keys have one after the other, whatever the page size and the order of pages.
  int64_t page_size = 0;
  int64_t num_pages = 0;

  std::optional<double> scale = {};  ///< factor on Q K^T, any finite number; default 1 / sqrt(head_dim)
  double softcap = 0;                ///< 0 = off

  bool causal = false;        ///< query i sees key j <= i + offset
  int64_t window_left = -1;   ///< query i sees j >= i + offset - window_left;  -1 = open
  int64_t window_right = -1;  ///< query i sees j <= i + offset + window_right; -1 = open
  Align align = Align::kUnset;
  std::optional<int64_t> query_offset = {};  ///< the offset itself, the same for every sequence; excludes `align`
  bool has_query_offsets = false;            ///< query_offsets [batch] is given with each call; excludes both
  bool has_windows = false;  ///< window_lo and window_hi [seqlen_q] are given with each call; not when packed

  /// Keys j < sink_keys are seen whatever window_left and window_lo say: the beginning of a text that windows slide over
  /// (StreamingLLM, arXiv:2309.17453). Causal, window_right, window_hi, lengths and masks hide them as others. 0 = none.
  int64_t sink_keys = 0;

  BroadcastOperand attn_mask = {.dtype = DType::kBool};  ///< kBool, true = may look

  /// attn_mask tells of the last keys of each sequence alone: its last dim is any n from 0 to seqlen_k, and column c is key
  /// len_k - n + c; the mask hides no key before. What a tree of drafted tokens sees of itself, at the end of a cache.
  bool mask_at_end = false;
  BroadcastOperand attn_bias = {};  ///< float32, bfloat16, float16 (float64 with float64 inputs); -inf hides a key
  int alibi_slopes_ndim = 0;        ///< 0 = no ALiBi, 1 = slopes [num_heads], 2 = slopes [batch, num_heads]; float32

  /// sink_logits [num_heads] are given with each call: one more logit of each row of a head, which takes a share of the
  /// weights and has no value (gpt-oss; a sink of 0 makes it "softmax off by one").
  bool has_sink_logits = false;

  /// With kNone there is no logsumexp, and so no sink, delta or grad_logsumexp; results of parts of the keys are added.
  Normalizer normalizer = Normalizer::kSoftmax;

  double dropout_p = 0;               ///< 0..1; SEMANTICS: bits of Philox4x32-10, see polyhead/dropout.h
  DropoutOrigin dropout_origin = {};  ///< of a shard, which draws the mask of the whole; unused if dropout_p is 0

  ReturnWeights return_weights = ReturnWeights::kNone;  ///< costs seqlen_q * seqlen_k memory: the caller's tensor
  bool return_column_sums = false;                      ///< sum over queries of P before dropout; not when packed

  /// What is done to a score after bias and ALiBi, and which keys it hides besides. Null: nothing. A score of -inf hides
  /// its key. An index of a visible pair that lies outside of its tensor is an error.
  SharedProgram program = {};
  std::vector<CaptureShape> captures = {};  ///< of the program's tensors, in its order; each call gives them

  bool operator==(const AttentionDesc&) const = default;  ///< field by field
};

/// What out and grad_out, or grad_query, grad_key and grad_value, are stored in.
inline DType out_dtype(const AttentionDesc& desc) { return desc.out_dtype.value_or(desc.dtype); }
inline DType grad_dtype(const AttentionDesc& desc) { return desc.grad_dtype.value_or(desc.dtype); }

/// What key and value are stored in.
inline DType key_dtype(const AttentionDesc& desc) { return desc.key_dtype.value_or(desc.dtype); }
inline DType value_dtype(const AttentionDesc& desc) { return desc.value_dtype.value_or(desc.dtype); }

/// The tensors of one forward call. B batch, Sq / Sk lengths, H heads, G key/value heads, D / Dv head dims.
/// Outputs must not overlap themselves, each other or an input.
struct ForwardArgs {
  Tensor query = {};  ///< [B, Sq, H, D]    packed: [total_q, H, D]
  Tensor key = {};    ///< [B, Sk, G, D]    packed: [total_k, G, D]    paged: [num_pages, page_size, G, D]
  Tensor value = {};  ///< [B, Sk, G, Dv]   packed: [total_k, G, Dv]   paged: [num_pages, page_size, G, Dv]

  /// Of a key_dtype that has scales: dims of key but the last, then one for each group of a row: 1, or D / key_group. Keys of
  /// int4x2 are [..., D / 2]. Values likewise.
  Tensor key_scales = {};
  Tensor value_scales = {};

  Tensor attn_mask = {};     ///< 4-D with desc.attn_mask.dims; see desc.mask_at_end
  Tensor attn_bias = {};     ///< 4-D with desc.attn_bias.dims and dtype
  Tensor alibi_slopes = {};  ///< [H] or [B, H], float32
  Tensor sink_logits = {};   ///< [H], float32 (float64 with float64 inputs); -inf: a head without
  Tensor seqlens_q = {};     ///< [B], int32 or int64: 0 <= seqlens_q[b] <= Sq
  Tensor seqlens_k = {};     ///< [B], int32 or int64: 0 <= seqlens_k[b] <= Sk
  Tensor cu_seqlens_q = {};  ///< [B + 1], int32 or int64: starts at 0, never falls, ends at or before total_q
  Tensor cu_seqlens_k = {};  ///< [B + 1]; not when paged
  Tensor page_table = {};  ///< [B, Sk / page_size], int32 or int64: 0 to num_pages - 1, as far as seqlens_k[b] reaches
  Tensor query_offsets = {};  ///< [B], int32 or int64
  Tensor window_lo = {};      ///< [Sq], int32 or int64: query i sees keys window_lo[i] <= j < window_hi[i]
  Tensor window_hi = {};      ///< [Sq], int32 or int64; what lies outside of the keys is cut off

  std::span<const Tensor> captures = {};  ///< those of desc.program, in its order, with desc.captures' dtypes and dims

  std::optional<uint64_t> dropout_seed = {};  ///< any number; needed where desc.dropout_p is above 0
  uint32_t dropout_offset = 0;

  Tensor out = {};  ///< [B, Sq, H, Dv]   packed: [total_q, H, Dv]; in out_dtype(desc)
  /// Optional: [B, H, Sq], packed [H, total_q]; float32 (float64 with float64 inputs). Not with Normalizer::kNone.
  Tensor logsumexp = {};
  Tensor attn_weights = {};  ///< as desc.return_weights says, in desc.dtype
  Tensor column_sums = {};   ///< [B, H, Sk] float32 (float64 with float64 inputs), if desc.return_column_sums

  void* workspace = nullptr;  ///< at least Plan::workspace_bytes(), aligned to 64 bytes; contents need not be kept
  size_t workspace_bytes = 0;

  /// Where this call runs, if not as the plan says: on the threads that a host has to lend now, or on another stream.
  /// A device other than the plan's is an error.
  Where where = {};
};

/// The tensors of one backward call. The options' tensors and the dropout seed are those of the forward call.
/// Gradients that are not given are not computed; at least one is. Hidden rows and keys get exactly 0.
/// With out and logsumexp merged over parts of the keys (polyhead/merge.h), it gives the part's share of the gradients.
/// Returned weights and column sums have no gradient.
struct BackwardArgs {
  /// Query, key, value, options, dropout seed; out and logsumexp as forward wrote them (with Normalizer::kNone out is not
  /// read and may be left out); attn_weights and column_sums not given; a workspace of
  /// Plan::backward_workspace_bytes(); where this call runs.
  ForwardArgs forward = {};
  Tensor grad_out = {};        ///< [B, Sq, H, Dv]   packed: [total_q, H, Dv]; in out_dtype(desc), any strides
  Tensor grad_logsumexp = {};  ///< optional: shape and dtype of logsumexp
  /// Optional: sum over Dv of grad_out * out, where it is known already; shape and dtype of logsumexp. `forward.out` is
  /// then not read and may be left out. FlashAttention calls it delta or dsoftmax_sum.
  Tensor delta = {};

  Tensor grad_query = {};  ///< optional: shape of query, in grad_dtype(desc); likewise key, value
  Tensor grad_key = {};
  Tensor grad_value = {};
  Tensor grad_attn_bias = {};     ///< optional: shape and dtype of attn_bias: summed over the dims that broadcast
  Tensor grad_alibi_slopes = {};  ///< optional: shape of alibi_slopes, float32
  Tensor grad_sink_logits = {};   ///< optional: shape and dtype of sink_logits
  /// Optional: in the order of the program's captures, each optional: shape and dtype of a float capture.
  std::span<const Tensor> grad_captures = {};
  bool accumulate = false;  ///< true: add to what the gradient tensors hold; false: overwrite
};

/// A tensor of the calls of `desc`, for who allocates it: dtype and dims, contiguous, without data; not given where
/// the desc does not ask for it. `args.out = expected_tensor(desc, &ForwardArgs::out)`, then `args.out.data = ...`.
POLYHEAD_API Tensor expected_tensor(const AttentionDesc& desc, Tensor ForwardArgs::*tensor);

struct Kernel;          // src/contract/kernel.h
struct PlannedOperand;  // src/contract/attention_operands.h

struct PlanOptions {
  std::string_view kernel = {};  ///< force this one ("cpu_avx2"); empty: POLYHEAD_KERNEL, else the best that can
  Where where = {};              ///< where it runs: the CPU, on default_executor(), unless it says otherwise
};

/// A checked desc with its kernel and workspace size. Immutable: one plan may run on many threads at once, each call
/// with its own tensors and workspace. Running it allocates nothing. It never runs on more threads than its executor had
/// when it was made: for so many the workspace is sized.
class POLYHEAD_API Plan {
 public:
  const AttentionDesc& desc() const { return desc_; }
  const char* kernel_name() const;
  size_t workspace_bytes() const { return workspace_bytes_; }
  size_t backward_workspace_bytes() const { return backward_workspace_bytes_; }

  /// Checks `args` against the desc, then computes. On an error no output has been touched.
  Status forward(const ForwardArgs& args) const;

  /// The gradients that `args` asks for. Checks first; on an error none has been touched.
  Status backward(const BackwardArgs& args) const;

 private:
  friend Result<Plan> make_plan(const AttentionDesc&, const PlanOptions&);
  friend Status forward_unchecked(const Plan&, const ForwardArgs&);
  friend Status backward_unchecked(const Plan&, const BackwardArgs&);
  explicit Plan(const AttentionDesc& desc) : desc_(desc) {}
  AttentionDesc desc_;
  std::shared_ptr<const std::vector<PlannedOperand>> operands_;  // what each call must give
  const Kernel* kernel_ = nullptr;
  Where where_;
  int num_threads_ = 1;
  size_t workspace_bytes_ = 0;
  size_t backward_workspace_bytes_ = 0;
};

/// Checks `desc` (the error names the field and the numbers that disagree) and picks the first kernel that can. With
/// POLYHEAD_VERBOSE=1 in the environment each plan prints one line on stderr, a command line of `polyhead bench`; each
/// layer(), attention_block() and their plans one of `polyhead mha`. Nothing else is ever printed.
POLYHEAD_API Result<Plan> plan(const AttentionDesc& desc, const PlanOptions& options = {});

struct KernelReason {
  const char* kernel;
  std::string reason;  ///< "" = can compute it; else one clause, as "head_dim is 600, takes 1 to 512"
};

/// What plan() would choose and why, without making one.
struct Explanation {
  Status status;                      ///< as plan() would return
  std::string kernel;                 ///< the chosen one; "" if none
  std::vector<KernelReason> reasons;  ///< every kernel of this build, best first
  std::string measured;               ///< "" or why that order departs from what the CPU's feature flags tell:
                                      ///< "measured: cpu_avx512 before cpu_avx512bf16, 2.01 times as fast in ..."
  size_t workspace_bytes = 0;
  size_t backward_workspace_bytes = 0;
  double flops = 0;  ///< of forward: 2 * visible (query, key) pairs * (D + Dv), as causal, window and sizes tell
  double backward_flops = 0;  ///< of query, key and value gradients: 2 * pairs * (3 D + 2 Dv), five products
};
POLYHEAD_API Explanation explain(const AttentionDesc& desc, const PlanOptions& options = {});

}  // namespace polyhead
