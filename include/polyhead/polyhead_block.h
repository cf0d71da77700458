// polyhead for C: the two blocks of a transformer. Part of polyhead.h, which includes it; the rules there hold here.
//
//   polyhead_attention_block      y = x + dropout(layer(norm(x)))                        pre-norm
//                                 y = norm(x + dropout(layer(x)))                        post-norm
//   polyhead_feed_forward_block   y = x + dropout(dropout(activation(norm(x) W1 + b1)) W2 + b2)      likewise
//
// The full definition stands in polyhead/block.h, under the same names. Training: forward with a reserve, then backward
// with the same forward arguments.
#pragma once

#include "polyhead/polyhead_layer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum polyhead_norm_kind {
  POLYHEAD_NORM_NONE = 0,
  POLYHEAD_LAYER_NORM = 1,  ///< (x - mean) / sqrt(variance + eps) * gamma + beta
  POLYHEAD_RMS_NORM = 2     ///< x / sqrt(mean of x^2 + eps) * gamma + beta
} polyhead_norm_kind;

typedef enum polyhead_activation_kind {
  POLYHEAD_ACTIVATION_NONE = 0,
  POLYHEAD_RELU = 1,
  POLYHEAD_GELU = 2,       ///< with erf
  POLYHEAD_GELU_TANH = 3,  ///< with tanh
  POLYHEAD_SILU = 4
} polyhead_activation_kind;

/// A norm over the vector, and where it stands. Its layout is frozen.
typedef struct polyhead_norm_desc {
  int32_t kind;   ///< polyhead_norm_kind; default POLYHEAD_LAYER_NORM
  int32_t pre;    ///< boolean: of the input (default 1); 0: of the sum (post-norm)
  int32_t gamma;  ///< boolean: with a factor (default 1)
  int32_t beta;   ///< boolean: with a summand (default 1)
  double eps;     ///< positive; default 1e-5
} polyhead_norm_desc;

/// gamma and beta, or their gradients: [size], float32 or the block's dtype; as the desc says. Its layout is frozen.
typedef struct polyhead_norm_weights {
  polyhead_tensor gamma;
  polyhead_tensor beta;
} polyhead_norm_weights;

// ---- Attention block ----

typedef struct polyhead_attention_block_desc {
  size_t struct_size;  ///< sizeof(polyhead_attention_block_desc), by polyhead_attention_block_desc_init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused

  /// residual: whether x is added, which needs a layer whose out is as long as query. output_dropout_p is the block's.
  /// Needed; read while the block is made.
  const polyhead_layer_desc* layer;
  polyhead_norm_desc norm;
} polyhead_attention_block_desc;

/// Sets the defaults that stand beside the fields. `struct_size` is sizeof *desc.
POLYHEAD_API polyhead_status polyhead_attention_block_desc_init(polyhead_attention_block_desc* desc,
                                                                size_t struct_size);

/// Immutable: one block may run on many threads at once, each call with its own tensors, workspace and reserve.
typedef struct polyhead_attention_block polyhead_attention_block;

/// `options` may be NULL: the defaults. A kernel that is forced must have matrix products.
POLYHEAD_API polyhead_status polyhead_attention_block_create(const polyhead_attention_block_desc* desc,
                                                             const polyhead_plan_options* options,
                                                             polyhead_attention_block** block);

/// NULL is fine.
POLYHEAD_API void polyhead_attention_block_destroy(polyhead_attention_block* block);

/// The block's layer, which lives as long as the block: for its weights (polyhead_layer_weights_bytes, _weight_layout,
/// _weights_in, _prepack_weights). A null block gives NULL and sets polyhead_last_error().
POLYHEAD_API const polyhead_layer* polyhead_attention_block_layer(const polyhead_attention_block* block);

/// A null block gives 0 and sets polyhead_last_error().
POLYHEAD_API size_t polyhead_attention_block_workspace_bytes(const polyhead_attention_block* block);  ///< of forward
POLYHEAD_API size_t polyhead_attention_block_backward_workspace_bytes(const polyhead_attention_block* block);
POLYHEAD_API size_t polyhead_attention_block_reserve_bytes(const polyhead_attention_block* block);

/// All default to "not given".
typedef struct polyhead_attention_block_forward_args {
  size_t struct_size;  ///< sizeof(polyhead_attention_block_forward_args), by its init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused

  /// query is x. key and value: neither, and x (normed, if norm comes first) attends to itself; or both. No residual,
  /// key_cache, value_cache or step; with a cache, slots without key and value store those of x. Reserve and workspace are the
  /// block's. Padding of x must hold finite numbers. Needed.
  const polyhead_layer_forward_args* layer;
  polyhead_norm_weights norm;
} polyhead_attention_block_forward_args;

POLYHEAD_API polyhead_status polyhead_attention_block_forward_args_init(polyhead_attention_block_forward_args* args,
                                                                        size_t struct_size);

/// Checks, then computes. Without a reserve: inference, without dropout.
POLYHEAD_API polyhead_status polyhead_attention_block_forward(const polyhead_attention_block* block,
                                                              const polyhead_attention_block_forward_args* args);

/// All gradients of a block at once, each optional. All default to "not given".
typedef struct polyhead_attention_block_backward_args {
  size_t struct_size;  ///< sizeof(polyhead_attention_block_backward_args), by its init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused

  /// As forward was given it, with its reserve; the workspace is this call's. Needed.
  const polyhead_attention_block_forward_args* forward;
  polyhead_tensor grad_out;
  polyhead_tensor grad_query;  ///< of x, the residual's share included
  polyhead_tensor grad_key;    ///< only where key and value are given
  polyhead_tensor grad_value;
  polyhead_tensor grad_attn_bias;
  polyhead_tensor grad_alibi_slopes;
  const polyhead_layer_weights* grad_weights;  ///< NULL (default): none
  polyhead_norm_weights grad_norm;
  int32_t accumulate;  ///< boolean: 1 adds to grad_weights and grad_norm; the others are overwritten always
  int32_t reserved;    ///< 0
  const polyhead_tensor* grad_captures;  ///< as in polyhead_backward_args
  size_t num_grad_captures;              ///< default 0
  polyhead_tensor grad_sink_logits;
} polyhead_attention_block_backward_args;

POLYHEAD_API polyhead_status polyhead_attention_block_backward_args_init(polyhead_attention_block_backward_args* args,
                                                                         size_t struct_size);

POLYHEAD_API polyhead_status polyhead_attention_block_backward(const polyhead_attention_block* block,
                                                               const polyhead_attention_block_backward_args* args);

// ---- Feed-forward block ----

typedef struct polyhead_feed_forward_block_desc {
  size_t struct_size;  ///< sizeof(polyhead_feed_forward_block_desc), by polyhead_feed_forward_block_desc_init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused

  int64_t batch;       ///< default 1
  int64_t seqlen;      ///< default 0
  int64_t size;        ///< of a vector of x and y; default 0
  int64_t inner_size;  ///< between the products; default 0

  int32_t activation;  ///< polyhead_activation_kind; default POLYHEAD_GELU
  int32_t bias1;       ///< boolean; default 1
  int32_t bias2;       ///< boolean; default 1
  int32_t residual;    ///< boolean; default 1

  double inner_dropout_p;   ///< after the activation; in training only, like the next; default 0
  double output_dropout_p;  ///< before the residual; default 0
  polyhead_norm_desc norm;
  int32_t dtype;     ///< polyhead_dtype of all tensors; float32 (default), bfloat16, float16, float64
  int32_t reserved;  ///< 0
} polyhead_feed_forward_block_desc;

/// Sets the defaults that stand beside the fields. `struct_size` is sizeof *desc.
POLYHEAD_API polyhead_status polyhead_feed_forward_block_desc_init(polyhead_feed_forward_block_desc* desc,
                                                                   size_t struct_size);

/// Immutable: one block may run on many threads at once, each call with its own tensors, workspace and reserve.
typedef struct polyhead_feed_forward_block polyhead_feed_forward_block;

/// `options` may be NULL: the defaults. A kernel that is forced must have matrix products.
POLYHEAD_API polyhead_status polyhead_feed_forward_block_create(const polyhead_feed_forward_block_desc* desc,
                                                                const polyhead_plan_options* options,
                                                                polyhead_feed_forward_block** block);

/// NULL is fine.
POLYHEAD_API void polyhead_feed_forward_block_destroy(polyhead_feed_forward_block* block);

/// A null block gives 0 and sets polyhead_last_error().
POLYHEAD_API size_t polyhead_feed_forward_block_workspace_bytes(const polyhead_feed_forward_block* block);
POLYHEAD_API size_t polyhead_feed_forward_block_backward_workspace_bytes(const polyhead_feed_forward_block* block);
POLYHEAD_API size_t polyhead_feed_forward_block_reserve_bytes(const polyhead_feed_forward_block* block);
POLYHEAD_API size_t polyhead_feed_forward_block_prepacked_weights_bytes(const polyhead_feed_forward_block* block);

/// Name of the products' kernel, alive as long as the library. A null block gives "" and sets polyhead_last_error().
POLYHEAD_API const char* polyhead_feed_forward_block_kernel_name(const polyhead_feed_forward_block* block);

/// The weights of a block, or their gradients; any strides. Its layout is frozen.
typedef struct polyhead_feed_forward_weights {
  polyhead_tensor weight1;  ///< [size, inner_size]
  polyhead_tensor bias1;    ///< [inner_size], if desc.bias1
  polyhead_tensor weight2;  ///< [inner_size, size]
  polyhead_tensor bias2;    ///< [size], if desc.bias2
  polyhead_norm_weights norm;
} polyhead_feed_forward_weights;

/// weight1 and weight2 as products read them, prepacked once for many forward calls into `prepacked`, of `bytes`, at least
/// polyhead_feed_forward_block_prepacked_weights_bytes(block), aligned to 64. The other weights need not be given.
POLYHEAD_API polyhead_status polyhead_feed_forward_block_prepack_weights(const polyhead_feed_forward_block* block,
                                                                         const polyhead_feed_forward_weights* weights,
                                                                         void* prepacked, size_t bytes);

/// All default to "not given".
typedef struct polyhead_feed_forward_block_forward_args {
  size_t struct_size;  ///< sizeof(polyhead_feed_forward_block_forward_args), by its init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused

  polyhead_tensor x;  ///< [batch, seqlen, size], any strides
  const polyhead_feed_forward_weights* weights;
  // Two dropouts of one call must differ in seed or offset, or they would drop the same places: that is an error.
  uint64_t inner_dropout_seed;    ///< masks as polyhead_dropout_mask of [batch, 1, seqlen, inner_size]
  uint64_t output_dropout_seed;   ///< and of [batch, 1, seqlen, size]
  uint32_t inner_dropout_offset;  ///< 0 by default, like the others
  uint32_t output_dropout_offset;
  polyhead_tensor out;  ///< [batch, seqlen, size]

  void* reserve;           ///< NULL: inference; else aligned to 64 bytes, for backward
  size_t reserve_bytes;    ///< at least polyhead_feed_forward_block_reserve_bytes(block)
  void* workspace;         ///< aligned to 64 bytes; contents need not be kept
  size_t workspace_bytes;  ///< at least polyhead_feed_forward_block_workspace_bytes(block)

  /// NULL, or weight1 and weight2 as polyhead_feed_forward_block_prepack_weights() wrote them: the same bits in less time.
  /// Of `weights` forward then reads the rest alone; backward reads `weights`.
  const void* prepacked_weights;
  size_t prepacked_weights_bytes;

  polyhead_executor* executor;  ///< as in polyhead_layer_forward_args, like the next
  void* stream;
} polyhead_feed_forward_block_forward_args;

POLYHEAD_API polyhead_status
polyhead_feed_forward_block_forward_args_init(polyhead_feed_forward_block_forward_args* args, size_t struct_size);

/// Checks, then computes. Without a reserve: inference, without dropout.
POLYHEAD_API polyhead_status polyhead_feed_forward_block_forward(const polyhead_feed_forward_block* block,
                                                                 const polyhead_feed_forward_block_forward_args* args);

/// All default to "not given".
typedef struct polyhead_feed_forward_block_backward_args {
  size_t struct_size;  ///< sizeof(polyhead_feed_forward_block_backward_args), by its init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused

  /// As forward was given it, with its reserve; the workspace is this call's. Needed.
  const polyhead_feed_forward_block_forward_args* forward;
  polyhead_tensor grad_out;
  polyhead_tensor grad_x;                             ///< optional
  const polyhead_feed_forward_weights* grad_weights;  ///< each optional; NULL (default): none
  int32_t accumulate;                                 ///< boolean: 1 adds to grad_weights
  int32_t reserved;                                   ///< 0
} polyhead_feed_forward_block_backward_args;

POLYHEAD_API polyhead_status
polyhead_feed_forward_block_backward_args_init(polyhead_feed_forward_block_backward_args* args, size_t struct_size);

POLYHEAD_API polyhead_status polyhead_feed_forward_block_backward(
    const polyhead_feed_forward_block* block, const polyhead_feed_forward_block_backward_args* args);

#ifdef __cplusplus
}  // extern "C"
#endif
