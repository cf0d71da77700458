// polyhead for C: the layer (MultiHeadAttention). Part of polyhead.h, which includes it; the rules there hold here too.
//
//   q, k, v = query, key, value times Wq, Wk, Wv + biases     out = dropout(attention(q, k, v) Wo + bo) + residual
//
// The full definition stands in polyhead/layer.h. Training: forward with a reserve, then polyhead_layer_backward_data,
// then polyhead_layer_backward_weights, each with the same forward arguments.
#pragma once

#include "polyhead/polyhead.h"
#include "polyhead/polyhead_cache.h"

#ifdef __cplusplus
extern "C" {
#endif

/// What to compute. Every field is checked once, when a layer is made.
typedef struct polyhead_layer_desc {
  size_t struct_size;  ///< sizeof(polyhead_layer_desc), by polyhead_layer_desc_init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused

  int64_t batch;     ///< default 1
  int64_t beam;      ///< beams of query and out; default 1
  int64_t beam_kv;   ///< beams of key and value: 1 (default; shared by all beams of query) or `beam`
  int64_t seqlen_q;  ///< time steps of query and out; default 0
  int64_t seqlen_k;  ///< time steps of key and value, and of caches; in pages, what a sequence has room for; default 0

  int64_t num_heads;     ///< default 1
  int64_t num_heads_kv;  ///< default 1; divides num_heads

  int64_t query_size;       ///< length of a vector of query; likewise key, value
  int64_t key_size;         ///< default 0
  int64_t value_size;       ///< default 0
  int64_t query_proj_size;  ///< length of a head of q; 0 (default): no projection, a head is the whole vector
  int64_t key_proj_size;    ///< of k; what comes out must be as long as q's head
  int64_t value_proj_size;  ///< of v
  int64_t out_proj_size;    ///< length of a vector of out; 0: no projection, the heads side by side

  int32_t query_bias;  ///< boolean: a bias on that projection
  int32_t key_bias;    ///< boolean
  int32_t value_bias;  ///< boolean
  int32_t out_bias;    ///< boolean

  double output_dropout_p;  ///< 0 (default) to 1: after the output's bias, before the residual; in training only
  int32_t residual;         ///< boolean: a tensor of out's shape is added to it
  int32_t has_windows;      ///< boolean: window_lo and window_hi [seqlen_q] come with each call
  int32_t dtype;     ///< polyhead_dtype of all tensors and weights; float32 (default), bfloat16, float16, float64
  int32_t reserved;  ///< 0

  /// Options of the attention: scale, softcap, causal, windows, alignment, mask, bias, ALiBi, lengths, dropout_p, returned
  /// weights. Its sizes and dtype stay at their defaults. NULL (default): none. Read while the layer is made.
  const polyhead_attention_desc* attention;

  /// NULL (default), or what holds keys and values, in pages: inference alone, as LayerDesc::cache has it. num_heads_kv,
  /// head_dim and head_dim_v are the layer's, key_dtype and value_dtype `dtype` (not float64) or one that has scales; seqlen_k
  /// is a multiple of page_size, beam is 1, and seqlens_k comes with each call. Read while the layer is made.
  const polyhead_kv_cache_desc* cache;
  /// With a cache, time steps of key and value in a call that gives them; 0 (default): seqlen_q, they are the tokens of query.
  /// Else of another sequence, which has no rotary positions.
  int64_t seqlen_new;
} polyhead_layer_desc;

/// Sets the defaults that stand beside the fields. `struct_size` is sizeof *desc.
POLYHEAD_API polyhead_status polyhead_layer_desc_init(polyhead_layer_desc* desc, size_t struct_size);

/// A checked desc with its plans. Immutable: one layer may run on many threads at once, each call with its own tensors,
/// workspace and reserve. Running it allocates nothing.
typedef struct polyhead_layer polyhead_layer;

/// `options` may be NULL: the defaults. A kernel that is forced must have matrix products too; else
/// POLYHEAD_INVALID_ARGUMENT names those that have. On a GPU (options.device) tensors, weights, lengths, workspace and reserve
/// lie there; the host looks at nothing there, so lengths are cut to the tensors, not checked, and neither is what lies in a
/// reserve or in prepacked weights, nor the numbers of a cache: see polyhead/layer.h.
POLYHEAD_API polyhead_status polyhead_layer_create(const polyhead_layer_desc* desc,
                                                   const polyhead_plan_options* options, polyhead_layer** layer);

/// NULL is fine.
POLYHEAD_API void polyhead_layer_destroy(polyhead_layer* layer);

/// A null layer gives 0 and sets polyhead_last_error().
POLYHEAD_API size_t polyhead_layer_weights_bytes(const polyhead_layer* layer);
POLYHEAD_API size_t polyhead_layer_prepacked_weights_bytes(const polyhead_layer* layer);
POLYHEAD_API size_t polyhead_layer_workspace_bytes(const polyhead_layer* layer);           ///< of forward
POLYHEAD_API size_t polyhead_layer_backward_workspace_bytes(const polyhead_layer* layer);  ///< of both backward calls
POLYHEAD_API size_t polyhead_layer_reserve_bytes(const polyhead_layer* layer);

/// Name of the attention's kernel, alive as long as the library. A null layer gives "" and sets polyhead_last_error().
POLYHEAD_API const char* polyhead_layer_kernel_name(const polyhead_layer* layer);

// ---- Weights ----

typedef enum polyhead_weight_kind {
  POLYHEAD_QUERY_WEIGHT = 0,
  POLYHEAD_KEY_WEIGHT = 1,
  POLYHEAD_VALUE_WEIGHT = 2,
  POLYHEAD_OUT_WEIGHT = 3,
  POLYHEAD_QUERY_BIAS = 4,
  POLYHEAD_KEY_BIAS = 5,
  POLYHEAD_VALUE_BIAS = 6,
  POLYHEAD_OUT_BIAS = 7
} polyhead_weight_kind;

/// Where a weight lies in the buffer. y = x W, so dims are [size of x, size of y]; a bias is [size of y]. Its layout is
/// frozen.
typedef struct polyhead_weight_layout {
  int32_t present;     ///< boolean; 0: this layer has no such weight, all else is 0
  int32_t ndim;        ///< 2; of a bias 1
  int64_t offset;      ///< elements from the start of the buffer
  int64_t dims[2];     ///< unused ones are 0
  int64_t strides[2];  ///< in elements
} polyhead_weight_layout;

/// `kind` is a polyhead_weight_kind.
POLYHEAD_API polyhead_status polyhead_layer_weight_layout(const polyhead_layer* layer, int32_t kind,
                                                          polyhead_weight_layout* layout);

/// Weights, or their gradients, by kind: parts of one buffer (polyhead_layer_weights_in), or the caller's own arrays with
/// any strides. Those that the layer does not have are not given. Its layout is frozen.
typedef struct polyhead_layer_weights {
  polyhead_tensor tensors[8];  ///< [polyhead_weight_kind]; shapes as polyhead_weight_layout has them
} polyhead_layer_weights;

/// The tensors of a buffer of `bytes`, at least polyhead_layer_weights_bytes(layer), aligned to its elements.
POLYHEAD_API polyhead_status polyhead_layer_weights_in(const polyhead_layer* layer, void* buffer, size_t bytes,
                                                       polyhead_layer_weights* weights);

/// For weights that stay as they are over many calls: the matrices as products read them, prepacked once into `prepacked`, of
/// `bytes`, at least polyhead_layer_prepacked_weights_bytes(layer), aligned to 64. Biases need not be given. Layers that
/// agree in sizes of vectors and projections, dtype and kernel may share it. On a GPU it is put on the layer's stream.
POLYHEAD_API polyhead_status polyhead_layer_prepack_weights(const polyhead_layer* layer,
                                                            const polyhead_layer_weights* weights, void* prepacked,
                                                            size_t bytes);

// ---- Forward ----

/// What a call of a layer with desc.cache is given besides; seqlens_k counts the keys of this call too. Its layout is frozen.
typedef struct polyhead_layer_cache_args {
  polyhead_kv_tensors pool;    ///< as polyhead_kv_cache_tensors has it
  polyhead_tensor page_table;  ///< [batch, seqlen_k / page_size], int32 or int64, as in polyhead_forward_args
  /// [batch, seqlen_new, or seqlen_q where that is 0], int32 or int64: where each token of key and value goes; -1: nowhere. No
  /// slot twice. Given if key and value are; without all three the pages are read as they are.
  polyhead_tensor slots;
  polyhead_tensor positions;  ///< [batch, seqlen_q], int32 or int64: rows of cos and sin; if the cache's rotary_dim > 0
  polyhead_tensor cos;        ///< [positions, rotary_dim / 2], float32; likewise
  polyhead_tensor sin;        ///< the same of the sines
} polyhead_layer_cache_args;

/// The tensors of one forward call, all of desc.dtype unless told: shapes and meaning stand in polyhead/layer.h, beside
/// the fields of the same name. All default to "not given".
typedef struct polyhead_layer_forward_args {
  size_t struct_size;  ///< sizeof(polyhead_layer_forward_args), by polyhead_layer_forward_args_init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused

  polyhead_tensor query;     ///< [batch, beam, seqlen_q, query_size]; without beam where that is 1; likewise the others
  polyhead_tensor key;       ///< [batch, beam_kv, seqlen_k, key_size]
  polyhead_tensor value;     ///< [batch, beam_kv, seqlen_k, value_size]
  polyhead_tensor residual;  ///< as out, if desc.residual
  const polyhead_layer_weights* weights;

  polyhead_tensor attn_mask;      ///< as in polyhead_forward_args
  polyhead_tensor attn_bias;      ///< likewise
  polyhead_tensor alibi_slopes;   ///< likewise
  polyhead_tensor seqlens_q;      ///< [batch, beam] or [batch], int32 or int64
  polyhead_tensor seqlens_k;      ///< [batch, beam_kv] or [batch], likewise
  polyhead_tensor query_offsets;  ///< [batch, beam] or [batch], likewise
  polyhead_tensor window_lo;      ///< [seqlen_q], likewise: query i sees keys window_lo[i] <= j < window_hi[i]
  polyhead_tensor window_hi;      ///< [seqlen_q], likewise

  // Two dropouts of one call must differ in seed or offset, or they would drop the same places: that is an error.
  uint64_t dropout_seed;           ///< used if the attention's dropout_p > 0, in training
  uint64_t output_dropout_seed;    ///< used if output_dropout_p > 0, in training
  uint32_t dropout_offset;         ///< beam n draws with dropout_offset + n
  uint32_t output_dropout_offset;  ///< as polyhead_dropout_mask of [batch, beam, seqlen_q, out size]

  polyhead_tensor out;           ///< [batch, beam, seqlen_q, out size]
  polyhead_tensor attn_weights;  ///< as return_weights says: [batch, beam, num_heads, seqlen_q, seqlen_k], or averaged
  polyhead_tensor key_cache;    ///< [batch, beam_kv, seqlen_k, num_heads_kv, head dim]: inference, see polyhead/layer.h
  polyhead_tensor value_cache;  ///< likewise

  int64_t
      step;  ///< one step of decoding with caches: 0 .. seqlen_q - 1, which is a program's q; -1 (default): all steps

  void* reserve;           ///< NULL: inference; else aligned to 64 bytes, for the backward calls
  size_t reserve_bytes;    ///< at least polyhead_layer_reserve_bytes(layer)
  void* workspace;         ///< aligned to 64 bytes; contents need not be kept
  size_t workspace_bytes;  ///< at least polyhead_layer_workspace_bytes(layer)

  /// NULL, or the matrices of `weights` as polyhead_layer_prepack_weights() wrote them, aligned to 64 bytes: the same bits
  /// in less time. Of `weights` forward then reads the biases alone; the backward calls read `weights`.
  const void* prepacked_weights;
  size_t prepacked_weights_bytes;  ///< at least polyhead_layer_prepacked_weights_bytes(layer)

  const polyhead_tensor* captures;  ///< [num_captures]: those of the attention's program, as in polyhead_forward_args
  size_t num_captures;              ///< default 0

  polyhead_tensor sink_logits;  ///< as in polyhead_forward_args

  /// With desc.cache. Behind seqlens_q slots and positions are not looked at (slots, if seqlen_new is 0). Tokens that come at most
  /// 12 a call have the bits of one by one. On an error no page has been written.
  polyhead_layer_cache_args cache;

  /// Where this call runs, if not as the layer's options say; see polyhead_forward_args. Backward calls run where theirs say.
  polyhead_executor* executor;  ///< NULL (default): the layer's
  void* stream;                 ///< NULL (default): the layer's
} polyhead_layer_forward_args;

/// Makes every tensor "not given". `struct_size` is sizeof *args.
POLYHEAD_API polyhead_status polyhead_layer_forward_args_init(polyhead_layer_forward_args* args, size_t struct_size);

/// Checks `args` against the desc, then computes.
POLYHEAD_API polyhead_status polyhead_layer_forward(const polyhead_layer* layer,
                                                    const polyhead_layer_forward_args* args);

// ---- Backward ----

/// The tensors of both backward calls. The residual's gradient is grad_out itself. All default to "not given".
typedef struct polyhead_layer_backward_args {
  size_t struct_size;  ///< sizeof(polyhead_layer_backward_args), by polyhead_layer_backward_args_init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused

  /// What the forward call was given, with its reserve; out and attn_weights are not looked at. The workspace is this
  /// call's: polyhead_layer_backward_workspace_bytes(layer).
  const polyhead_layer_forward_args* forward;
  polyhead_tensor grad_out;  ///< as out, any strides; in padding it is not looked at

  polyhead_tensor grad_query;  ///< of backward_data, each optional; where two are the same view, it holds their sum
  polyhead_tensor grad_key;
  polyhead_tensor grad_value;
  polyhead_tensor grad_attn_bias;     ///< shape and dtype of attn_bias
  polyhead_tensor grad_alibi_slopes;  ///< shape of alibi_slopes, float32

  const polyhead_layer_weights* grad_weights;  ///< of backward_weights: each optional, one at least is given
  int32_t accumulate;                          ///< boolean: 1 adds to what grad_weights hold; 0 (default) overwrites
  int32_t reserved;                            ///< 0

  const polyhead_tensor* grad_captures;  ///< of backward_data, as in polyhead_backward_args; overwritten
  size_t num_grad_captures;              ///< default 0

  polyhead_tensor grad_sink_logits;  ///< of backward_data: shape and dtype of sink_logits
} polyhead_layer_backward_args;

/// Makes every tensor "not given". `struct_size` is sizeof *args.
POLYHEAD_API polyhead_status polyhead_layer_backward_args_init(polyhead_layer_backward_args* args, size_t struct_size);

/// The gradients of the inputs, after forward with a reserve; also completes the reserve for the next.
POLYHEAD_API polyhead_status polyhead_layer_backward_data(const polyhead_layer* layer,
                                                          const polyhead_layer_backward_args* args);

/// The gradients of the weights, after polyhead_layer_backward_data with the same reserve.
POLYHEAD_API polyhead_status polyhead_layer_backward_weights(const polyhead_layer* layer,
                                                             const polyhead_layer_backward_args* args);

#ifdef __cplusplus
}  // extern "C"
#endif

#include "polyhead/polyhead_block.h"  // the blocks around it
