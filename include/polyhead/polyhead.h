// polyhead for C (C99) and for every language that calls C: the nouns of the C++ headers, under the same names.
//
//   S = scale * Q K^T + attn_bias ...     P = softmax(S)     out = dropout(P) V     logsumexp = log sum_k exp(S)
//
// The full definition stands at the top of polyhead/attention.h. How a program computes attention:
//
//   polyhead_attention_desc desc;
//   polyhead_attention_desc_init(&desc, sizeof desc);        // defaults; then set what differs
//   desc.seqlen_q = desc.seqlen_k = 128, desc.num_heads = desc.num_heads_kv = 8, desc.head_dim = desc.head_dim_v = 64;
//   polyhead_attention_plan* plan = NULL;
//   if (polyhead_attention_plan_create(&desc, NULL, &plan) != POLYHEAD_OK) puts(polyhead_last_error());
//   ... polyhead_attention_forward(plan, &args), as often as needed, from any number of threads ...
//   ... polyhead_attention_backward(plan, &args), for training: the gradients that are asked for ...
//   polyhead_attention_plan_destroy(plan);
//
// Rules that hold for every function here:
// - No exception crosses, nothing is printed, nothing aborts. A null pointer where one is needed is refused by name.
// - A function that can fail returns a polyhead_status; polyhead_last_error() then has the sentence. On a failure, no
//   output has been touched, except that a handle asked for is set to NULL.
// - Every function may be called from any thread. Only destroying a handle needs care: nobody may use it any more.
// - Structs with a `struct_size` grow at their end. Their init function sets it; a library older than the program's
//   header refuses what it does not know, a newer one takes its defaults for what the program does not know.
// - Booleans are int32_t, 0 or 1; choices are int32_t with a value of the enum named beside them. Others are refused.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "polyhead/polyhead_core.h"  // versions, errors, tensors and threads

#ifdef __cplusplus
extern "C" {
#endif

// ---- Attention: what to compute ----

/// Where query i stands among the keys: at i + offset. Causal, window and ALiBi share this one diagonal.
typedef enum polyhead_align {
  POLYHEAD_ALIGN_UNSET = 0,        ///< an error where it would matter (a sequence with seqlen_q != seqlen_k)
  POLYHEAD_ALIGN_TOP_LEFT = 1,     ///< offset 0
  POLYHEAD_ALIGN_BOTTOM_RIGHT = 2  ///< offset seqlen_k - seqlen_q
} polyhead_align;

/// What makes the weights P of a row out of its scores.
typedef enum polyhead_normalizer {
  POLYHEAD_NORMALIZER_SOFTMAX = 0,
  /// Nothing: P is the score, or 0 where the key is hidden. With a program it is what that gives, as in sigmoid attention;
  /// without one, attention is linear in the scores. There is no logsumexp, and so no sink, delta or grad_logsumexp.
  POLYHEAD_NORMALIZER_NONE = 1
} polyhead_normalizer;

/// What to return of the weights P (after dropout and its scale).
typedef enum polyhead_return_weights {
  POLYHEAD_WEIGHTS_NONE = 0,
  POLYHEAD_WEIGHTS_PER_HEAD = 1,  ///< [batch, num_heads, seqlen_q, seqlen_k]
  POLYHEAD_WEIGHTS_MEAN = 2       ///< averaged over heads: [batch, seqlen_q, seqlen_k]
} polyhead_return_weights;

/// An operand that broadcasts to [batch, num_heads, seqlen_q, seqlen_k]: each of `dims` is 1 or the full size.
typedef struct polyhead_broadcast_operand {
  int32_t given;    ///< boolean; default 0
  int32_t dtype;    ///< polyhead_dtype
  int64_t dims[4];  ///< default 1, 1, 1, 1
} polyhead_broadcast_operand;

/// A program (docs/programs.md) captures at most so many tensors.
#define POLYHEAD_MAX_CAPTURES 8

/// What a tensor that a program captures looks like. Its layout is frozen.
typedef struct polyhead_capture_shape {
  int32_t dtype;    ///< polyhead_dtype: a float dtype, int32 or int64, or bool, as the program says
  int32_t ndim;     ///< 1 to 4, as many indices as the program gives; 1 for a single number, `name[]`
  int64_t dims[4];  ///< of ndim dims
} polyhead_capture_shape;

/// Where a shard over batch, heads, queries or keys stands in the whole whose dropout mask it draws: its element
/// (b, h, i, j) has the bits of head index first_head + b * num_heads + h, query first_query + i and key first_key + j.
/// All 0: a mask of its own. Its layout is frozen.
typedef struct polyhead_dropout_origin {
  int64_t first_head;
  int64_t num_heads;  ///< query heads in all; 0: as many as the call has
  int64_t first_query;
  int64_t first_key;  ///< a multiple of 8
} polyhead_dropout_origin;

/// What to compute. Every field is checked once, when a plan is made.
typedef struct polyhead_attention_desc {
  size_t struct_size;  ///< sizeof(polyhead_attention_desc), by polyhead_attention_desc_init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused

  int64_t batch;         ///< sequences; default 1
  int64_t seqlen_q;      ///< queries of a sequence; packed: rows of all sequences together. Default 0
  int64_t seqlen_k;      ///< keys of a sequence; packed: rows of all sequences together. Default 0
  int64_t num_heads;     ///< default 1
  int64_t num_heads_kv;  ///< default 1; divides num_heads; query head h reads h / (num_heads / num_heads_kv)
  int64_t head_dim;      ///< of query and key; default 0
  int64_t head_dim_v;    ///< of value and out; default 0
  int32_t dtype;         ///< polyhead_dtype of query, key and value: float32 (default), bfloat16, float16, float64

  int32_t packed;         ///< boolean: [rows, heads, dim] operands; cu_seqlens_q and cu_seqlens_k come with each call
  int32_t has_seqlens_q;  ///< boolean: seqlens_q [batch] comes with each call (padding on the right); not when packed
  int32_t has_seqlens_k;  ///< boolean: seqlens_k [batch] likewise

  double scale;       ///< factor on Q K^T, any finite number; read if has_scale, else it must be 0
  int32_t has_scale;  ///< boolean; default 0: the scale is 1 / sqrt(head_dim)

  int32_t causal;             ///< boolean: query i sees key j <= i + offset
  double softcap;             ///< S becomes softcap * tanh(S / softcap); 0 (default) = off
  int64_t window_left;        ///< query i sees j >= i + offset - window_left;  -1 (default) = open
  int64_t window_right;       ///< query i sees j <= i + offset + window_right; -1 (default) = open
  int64_t query_offset;       ///< the offset itself, the same for every sequence; read if has_query_offset, else 0
  int32_t has_query_offset;   ///< boolean; excludes align
  int32_t has_query_offsets;  ///< boolean: query_offsets [batch] comes with each call; excludes both
  int32_t align;              ///< polyhead_align; default unset

  int32_t alibi_slopes_ndim;  ///< 0 (default) = no ALiBi, 1 = slopes [num_heads], 2 = slopes [batch, num_heads]

  polyhead_broadcast_operand attn_mask;  ///< bool, 1 = may look
  polyhead_broadcast_operand attn_bias;  ///< float32, bfloat16, float16 (float64 with float64 inputs); -inf hides a key

  double dropout_p;            ///< 0 (default) to 1; see polyhead_dropout_mask
  int32_t return_weights;      ///< polyhead_return_weights; costs seqlen_q * seqlen_k memory: the caller's tensor
  int32_t return_column_sums;  ///< boolean: sum over queries of P before dropout; not when packed

  polyhead_dropout_origin dropout_origin;  ///< default all 0; unused if dropout_p is 0

  /// polyhead_dtype of out and grad_out, and of grad_query, grad_key and grad_value; read if has_..., else 0. Default:
  /// `dtype`. Beside bfloat16 and float16 each may be float32: the sums as they are before rounding, for parts that are
  /// merged and gradients that accumulate.
  int32_t has_out_dtype;   ///< boolean; default 0
  int32_t out_dtype;       ///< of out and grad_out
  int32_t has_grad_dtype;  ///< boolean; default 0
  int32_t grad_dtype;      ///< of grad_query, grad_key and grad_value

  int32_t has_windows;      ///< boolean: window_lo and window_hi [seqlen_q] come with each call; not when packed
  int32_t has_sink_logits;  ///< boolean: sink_logits [num_heads] come with each call; default 0

  /// What is done to each score after bias and ALiBi, and which keys a query sees besides, as text:
  /// "score = score - slope[h] * abs(q - k); mask = k <= q" (docs/programs.md). A score of -inf hides its key. An index
  /// of a visible pair that lies outside of its tensor is an error. NULL (default): neither. Read by plan_create alone.
  const char* program;
  /// The tensors that the program captures, in the order in which its text declares or first indexes them. Read by
  /// plan_create alone; NULL if num_captures is 0.
  const polyhead_capture_shape* captures;
  size_t num_captures;  ///< as many as the program captures; default 0

  /// Keys of a page; 0 (default): keys and values are not paged. Else they lie in a pool of num_pages pages, [num_pages,
  /// page_size, num_heads_kv, dim], and page_table [batch, seqlen_k / page_size], which comes with each call, tells which
  /// pages hold each sequence, in order: sequences may share pages, and what no length reaches is never read. seqlens_k is
  /// needed, seqlen_k is a multiple of page_size; packed queries then have cu_seqlens_q alone. Forward only.
  int64_t page_size;
  int64_t num_pages;  ///< default 0

  int32_t normalizer;  ///< polyhead_normalizer; default softmax
  int32_t reserved;    ///< 0

  /// polyhead_dtype of key and of value, each its own; read if has_..., else 0. Default: `dtype`. Else what a cache may be
  /// stored in: int8, float8_e4m3, float8_e5m2 or int4x2, of which an element is the number that is stored times its scale:
  /// key_scales and value_scales come with each call, float32, with int4x2 float16. Forward only. polyhead_cache.h writes them.
  int32_t has_key_dtype;  ///< boolean; default 0
  int32_t key_dtype;
  int32_t has_value_dtype;  ///< boolean; default 0
  int32_t value_dtype;
  /// How many neighbours of a row share a scale: a multiple of 16 that divides head_dim (head_dim_v); 0 (default): all.
  int64_t key_group;
  int64_t value_group;

  /// Keys j < sink_keys are seen whatever window_left and window_lo say; 0 (default): none. Causal, window_right, window_hi,
  /// lengths and masks hide them as others.
  int64_t sink_keys;

  /// Boolean, default 0: attn_mask tells of the last keys of each sequence alone: its last dim is any n from 0 to seqlen_k, and
  /// column c is key len_k - n + c; the mask hides no key before. What a tree of drafted tokens sees of itself.
  int32_t mask_at_end;
  int32_t reserved_2;  ///< 0
} polyhead_attention_desc;

/// Sets the defaults that stand beside the fields. `struct_size` is sizeof *desc.
POLYHEAD_API polyhead_status polyhead_attention_desc_init(polyhead_attention_desc* desc, size_t struct_size);

// ---- Attention: plans ----

typedef struct polyhead_plan_options {
  size_t struct_size;  ///< sizeof(polyhead_plan_options), by polyhead_plan_options_init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused
  const char* kernel;  ///< force this one ("cpu_avx2"); NULL (default) or "": POLYHEAD_KERNEL, else the best that can
  polyhead_executor* executor;  ///< the threads it runs on; must outlive the plan. NULL (default): the library's own
  int32_t device;               ///< polyhead_device of the tensors and the workspace; default POLYHEAD_CPU
  int32_t reserved;             ///< 0
  void* stream;                 ///< of a GPU: the queue that the work is put on. The CPU has none: NULL (default)
} polyhead_plan_options;

/// Sets the defaults. `struct_size` is sizeof *options.
POLYHEAD_API polyhead_status polyhead_plan_options_init(polyhead_plan_options* options, size_t struct_size);

/// A checked desc with its kernel and workspace size. Immutable: one plan may run on many threads at once, each call
/// with its own tensors and workspace. Running it allocates nothing.
typedef struct polyhead_attention_plan polyhead_attention_plan;

/// Checks `desc` and picks the first kernel that can. `options` may be NULL: the defaults.
/// POLYHEAD_INVALID_ARGUMENT names the field and the numbers that disagree; POLYHEAD_UNSUPPORTED says why no kernel, or
/// not the forced one, can compute it.
POLYHEAD_API polyhead_status polyhead_attention_plan_create(const polyhead_attention_desc* desc,
                                                            const polyhead_plan_options* options,
                                                            polyhead_attention_plan** plan);

/// NULL is fine.
POLYHEAD_API void polyhead_attention_plan_destroy(polyhead_attention_plan* plan);

/// Bytes of the workspace that each forward call brings. A null plan gives 0 and sets polyhead_last_error().
POLYHEAD_API size_t polyhead_attention_plan_workspace_bytes(const polyhead_attention_plan* plan);

/// Bytes of the workspace that each backward call brings. A null plan gives 0 and sets polyhead_last_error().
POLYHEAD_API size_t polyhead_attention_plan_backward_workspace_bytes(const polyhead_attention_plan* plan);

/// Name of the kernel, alive as long as the library. A null plan gives "" and sets polyhead_last_error().
POLYHEAD_API const char* polyhead_attention_plan_kernel_name(const polyhead_attention_plan* plan);

// ---- Attention: forward ----

/// The tensors of one forward call. B batch, Sq / Sk lengths, H heads, G key/value heads, D / Dv head dims.
/// Outputs must not overlap themselves, each other or an input. All default to "not given".
typedef struct polyhead_forward_args {
  size_t struct_size;  ///< sizeof(polyhead_forward_args), by polyhead_forward_args_init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused

  polyhead_tensor query;  ///< [B, Sq, H, D]    packed: [total_q, H, D]
  polyhead_tensor key;    ///< [B, Sk, G, D]    packed: [total_k, G, D]    paged: [num_pages, page_size, G, D]
  polyhead_tensor value;  ///< [B, Sk, G, Dv]   packed: [total_k, G, Dv]   paged: [num_pages, page_size, G, Dv]

  polyhead_tensor attn_mask;      ///< 4-D with desc.attn_mask.dims
  polyhead_tensor attn_bias;      ///< 4-D with desc.attn_bias.dims and dtype
  polyhead_tensor alibi_slopes;   ///< [H] or [B, H], float32
  polyhead_tensor seqlens_q;      ///< [B], int32 or int64: 0 <= seqlens_q[b] <= Sq
  polyhead_tensor seqlens_k;      ///< [B], int32 or int64: 0 <= seqlens_k[b] <= Sk
  polyhead_tensor cu_seqlens_q;   ///< [B + 1], int32 or int64: starts at 0, never falls, ends at or before total_q
  polyhead_tensor cu_seqlens_k;   ///< [B + 1]; not when paged
  polyhead_tensor query_offsets;  ///< [B], int32 or int64

  uint64_t dropout_seed;    ///< used if desc.dropout_p > 0
  uint32_t dropout_offset;  ///< likewise
  uint32_t reserved;        ///< 0

  polyhead_tensor out;           ///< [B, Sq, H, Dv]   packed: [total_q, H, Dv]; in desc.out_dtype
  polyhead_tensor logsumexp;     ///< optional: [B, H, Sq]   packed: [H, total_q]; float32 (float64 with float64 inputs)
  polyhead_tensor attn_weights;  ///< as desc.return_weights says, in desc.dtype
  polyhead_tensor column_sums;   ///< [B, H, Sk] float32 (float64 with float64 inputs), if desc.return_column_sums

  void* workspace;         ///< aligned to 64 bytes; may be NULL if the plan needs 0 bytes. Contents need not be kept
  size_t workspace_bytes;  ///< at least polyhead_attention_plan_workspace_bytes(plan)

  /// Where this call runs, if not as the plan says: on the threads that a host has to lend now, or on another stream.
  polyhead_executor*
      executor;  ///< NULL (default): the plan's. It never runs more tasks at once than the plan's has threads
  void* stream;  ///< NULL (default): the plan's

  /// A range of keys for each query, if desc.has_windows: query i of every sequence and head sees key j only where
  /// window_lo[i] <= j < window_hi[i]. What lies outside of the keys is cut off, an empty range sees none.
  polyhead_tensor window_lo;  ///< [Sq], int32 or int64
  polyhead_tensor window_hi;  ///< [Sq], int32 or int64

  const polyhead_tensor* captures;  ///< [num_captures]: those of desc.program, with desc.captures' dtypes and dims
  size_t num_captures;              ///< default 0

  /// If desc.has_sink_logits: [H], float32 (float64 with float64 inputs): one more logit of each row of a head, which takes
  /// a share of the weights and has no value; logsumexp counts it. -inf: a head without.
  polyhead_tensor sink_logits;
  /// [B, Sk / page_size], int32 or int64: 0 to num_pages - 1, as far as seqlens_k[b] reaches; if desc.page_size > 0.
  polyhead_tensor page_table;
  /// Of a desc.key_dtype that has scales: dims of key but the last, then one for each group of a row: 1, or D / key_group.
  /// Keys of int4x2 are [..., D / 2]. Values likewise.
  polyhead_tensor key_scales;
  polyhead_tensor value_scales;
} polyhead_forward_args;

/// Makes every tensor "not given". `struct_size` is sizeof *args.
POLYHEAD_API polyhead_status polyhead_forward_args_init(polyhead_forward_args* args, size_t struct_size);

/// Checks `args` against the plan's desc, then computes: fills out, and what else was asked for.
POLYHEAD_API polyhead_status polyhead_attention_forward(const polyhead_attention_plan* plan,
                                                        const polyhead_forward_args* args);

// ---- Attention: backward ----

/// The tensors of one backward call. Gradients that are not given are not computed; at least one is. Hidden rows and
/// keys get exactly 0. Gradients must not overlap themselves, each other or an input. With the out and logsumexp of
/// polyhead_merge, the gradients are the part's share of the whole's. All default to "not given".
typedef struct polyhead_backward_args {
  size_t struct_size;  ///< sizeof(polyhead_backward_args), by polyhead_backward_args_init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused

  /// The forward call: query, key, value, options, dropout seed; out and logsumexp as it wrote them, which are only
  /// read; attn_weights and column_sums not given, they have no gradient. The workspace is this call's: at least
  /// polyhead_attention_plan_backward_workspace_bytes(plan).
  const polyhead_forward_args* forward;

  polyhead_tensor grad_out;        ///< [B, Sq, H, Dv]   packed: [total_q, H, Dv]; in desc.out_dtype, any strides
  polyhead_tensor grad_logsumexp;  ///< optional: shape and dtype of logsumexp
  /// Optional: sum over Dv of grad_out * out, where it is known already; shape and dtype of logsumexp. forward->out is
  /// then not read and may be left out.
  polyhead_tensor delta;

  polyhead_tensor grad_query;         ///< optional: shape of query, in desc.grad_dtype; likewise key, value
  polyhead_tensor grad_key;           ///< optional
  polyhead_tensor grad_value;         ///< optional
  polyhead_tensor grad_attn_bias;     ///< optional: shape and dtype of attn_bias: summed over the dims that broadcast
  polyhead_tensor grad_alibi_slopes;  ///< optional: shape of alibi_slopes, float32
  int32_t accumulate;                 ///< boolean: 1 adds to what the gradients hold; 0 (default) overwrites
  int32_t reserved;                   ///< 0

  /// [num_grad_captures]: in the order of the program's captures, each optional: shape and dtype of a float capture.
  const polyhead_tensor* grad_captures;
  size_t num_grad_captures;  ///< as many as the program captures, or 0 (default): no gradient of any

  polyhead_tensor grad_sink_logits;  ///< optional: shape and dtype of sink_logits
} polyhead_backward_args;

/// Makes every tensor "not given". `struct_size` is sizeof *args.
POLYHEAD_API polyhead_status polyhead_backward_args_init(polyhead_backward_args* args, size_t struct_size);

/// Checks `args` against the plan's desc, then computes the gradients that are asked for.
POLYHEAD_API polyhead_status polyhead_attention_backward(const polyhead_attention_plan* plan,
                                                         const polyhead_backward_args* args);

// ---- Attention: parts of the keys, merged ----

/// What one part's forward call wrote, or its gradients. Its layout is frozen.
typedef struct polyhead_partial {
  polyhead_tensor out;        ///< [B, Sq, H, Dv]   packed: [total_q, H, Dv]; float32, bfloat16, float16 or float64
  polyhead_tensor logsumexp;  ///< [B, H, Sq]       packed: [H, total_q]; float32 (float64 with float64 out)
} polyhead_partial;

/// Joins the results of attention whose keys were split over calls, machines or time to the result of the whole:
/// `L = log sum_i exp(L_i)`, `w_i = exp(L_i - L)`, `O = sum_i w_i O_i`.
/// `parts` are 1 to 65536, of one shape, any strides, any mix of float32, bfloat16 and float16, or all float64; one that
/// sees no key (L_i = -inf) changes nothing. `merged` is written, rounded once to its own dtype; its logsumexp may be not given. Each of its tensors may be one of a part's (the same pointer
/// and strides); it must not overlap them otherwise. `executor` may be NULL: the library's own. What to give the parts
/// as query_offset and dropout_offset stands in polyhead/merge.h.
POLYHEAD_API polyhead_status polyhead_merge(const polyhead_partial* parts, size_t num_parts,
                                            const polyhead_partial* merged, polyhead_executor* executor);

/// Gradients of polyhead_merge: dO_i = w_i dO, dL_i = w_i (dO . (O_i - O) + dL). `parts` are all or some of those that
/// were joined to `merged`; `grad_merged` has the gradients of `merged` (logsumexp may be not given: 0). `grad_parts`,
/// num_parts of them, are written: a tensor that is not given is not computed. A part that sees no key gets 0.
POLYHEAD_API polyhead_status polyhead_merge_backward(const polyhead_partial* parts, size_t num_parts,
                                                     const polyhead_partial* merged,
                                                     const polyhead_partial* grad_merged,
                                                     const polyhead_partial* grad_parts, polyhead_executor* executor);

// ---- Attention: explain ----

/// What polyhead_attention_plan_create would choose and why. Made and freed by the library, so it may grow at its end.
typedef struct polyhead_explanation {
  size_t struct_size;                 ///< of the library that made it: what lies behind is not there
  int32_t status;                     ///< polyhead_status that polyhead_attention_plan_create would return
  int32_t reserved;                   ///< 0
  const char* message;                ///< its sentence; "" if status is POLYHEAD_OK
  const char* kernel;                 ///< the chosen kernel; "" if none
  size_t num_kernels;                 ///< of this build, best first
  const char* const* kernels;         ///< [num_kernels] their names
  const char* const* reasons;         ///< [num_kernels] "" = can; else a clause, as "head_dim is 600, takes 1 to 512"
  size_t workspace_bytes;             ///< of the chosen kernel
  double flops;                       ///< of forward, as polyhead::Explanation defines it
  size_t backward_workspace_bytes;    ///< of the chosen kernel
  double backward_flops;              ///< of the gradients of query, key and value, likewise
  const char* measured;               ///< "" or why the order of kernels departs from what the CPU's flags tell
  size_t num_program_values;          ///< of desc.program; 0 without one
  const char* const* program_values;  ///< [num_program_values] as "slope[h] * float(abs(q - k))", "score = ..."
  const char* const* depends_on;      ///< [num_program_values] "nothing", "q", "k", "q - k" or "q, k"
} polyhead_explanation;

/// How many blocks of 64 queries x 128 keys of a call are hidden throughout, seen in part (or not told), and seen
/// throughout, as polyhead::MaskBlocks has it. Its layout is frozen.
typedef struct polyhead_mask_blocks {
  int64_t none;
  int64_t some;
  int64_t all;
} polyhead_mask_blocks;

/// A desc that no plan can be made of is not a failure of this call: explanation->status tells. `options` may be NULL.
POLYHEAD_API polyhead_status polyhead_attention_explain(const polyhead_attention_desc* desc,
                                                        const polyhead_plan_options* options,
                                                        polyhead_explanation** explanation);

/// Counts them. Of `args` the captures, lengths, offsets and windows are read that the desc asks for, and nothing else.
POLYHEAD_API polyhead_status polyhead_attention_count_mask_blocks(const polyhead_attention_desc* desc,
                                                                  const polyhead_forward_args* args,
                                                                  polyhead_mask_blocks* blocks);

/// NULL is fine.
POLYHEAD_API void polyhead_explanation_destroy(polyhead_explanation* explanation);

// ---- Kernels and dropout ----

/// Names of the kernels usable on this machine, best first, "reference" last, then NULL. Alive as long as the library.
/// When memory runs out: an empty list, and polyhead_last_error() says so.
POLYHEAD_API const char* const* polyhead_kernels(void);

/// Instruction sets the CPU reports that a kernel of ours uses, best first, as "amx avx512bf16 avx512 avx2" or
/// "neon"; "" if none, or when memory runs out. Alive as long as the library.
POLYHEAD_API const char* polyhead_cpu_features(void);

/// Fills `kept` ([B, H, Sq, Sk], POLYHEAD_BOOL) with 1 where dropout keeps the weight, else 0: a pure function of
/// (seed, offset, batch, head, query, key). The rule stands in polyhead/dropout.h.
POLYHEAD_API polyhead_status polyhead_dropout_mask(double dropout_p, uint64_t seed, uint32_t offset,
                                                   const polyhead_tensor* kept);

/// polyhead_dropout_mask of a shard. `dropout_origin` may be NULL: all 0, a mask of its own.
POLYHEAD_API polyhead_status polyhead_shard_dropout_mask(double dropout_p, uint64_t seed, uint32_t offset,
                                                         const polyhead_dropout_origin* dropout_origin,
                                                         const polyhead_tensor* kept);

#ifdef __cplusplus
}  // extern "C"
#endif

#include "polyhead/polyhead_cache.h"  // caches of keys and values
#include "polyhead/polyhead_layer.h"  // the layer: attention between projections
