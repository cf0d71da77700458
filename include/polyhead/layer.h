// Multi-head attention as a layer: attention between projections, as cuDNN's multi-head attention has it.
//   q = query Wq + bq     [batch, beam, seqlen_q, num_heads * head_dim]        head h owns columns h * head_dim ...
//   k = key Wk + bk       [batch, beam_kv, seqlen_k, num_heads_kv * head_dim]
//   v = value Wv + bv     [batch, beam_kv, seqlen_k, num_heads_kv * head_dim_v]
//   O = attention(q, k, v)                                                     polyhead/attention.h
//   out = dropout(O Wo + bo) + residual                                        [batch, beam, seqlen_q, out size]
// Any projection may be off: every head then sees the whole vector; without Wo, out has the heads side by side.
//
//   LayerDesc desc;
//   desc.seqlen_q = desc.seqlen_k = 128, desc.num_heads = desc.num_heads_kv = 8;
//   desc.query_size = desc.key_size = desc.value_size = desc.out_proj_size = 512;
//   desc.query_proj_size = desc.key_proj_size = desc.value_proj_size = 64;
//   Result<Layer> layer = polyhead::layer(desc);
//   LayerForwardArgs args;
//   args.query = args.key = args.value = Tensor(x, DType::kFloat32, {1, 128, 512});
//   args.weights = layer->weights_in(buffer);  // of layer->weights_bytes(); or tensors of the caller's own
//   args.out = Tensor(y, DType::kFloat32, {1, 128, 512});
//   args.workspace = ..., args.workspace_bytes = layer->workspace_bytes();
//   Status status = layer->forward(args);
//
// Training: forward with a reserve, then backward_data, then backward_weights, each with the same `forward` arguments.
// On a GPU (options.where.device = Device::kCuda): tensors, weights, lengths, workspace and reserve lie there, and calls put
// their work on a stream and come back. The host looks at nothing there: lengths and windows are cut to the tensors, not
// checked, and neither is what lies in a reserve or in prepacked weights. Caches and their numbers lie there too: slots and
// positions are as KvCache::append has them, a page that does not exist holds zeros.
// Decoding: `step` on caches of one length, or LayerDesc::cache: pages, any stored format, rotary positions, several tokens a
// call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "polyhead/api.h"
#include "polyhead/attention.h"
#include "polyhead/cache.h"
#include "polyhead/executor.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead {

/// What to compute. Plain data; every field is checked once, when a layer is made.
struct LayerDesc {
  int64_t batch = 1;
  int64_t beam = 1;      ///< beams of query and out, at least 1
  int64_t beam_kv = 1;   ///< beams of key and value: 1 (all beams of query share them) or `beam` (each has its own)
  int64_t seqlen_q = 0;  ///< time steps of query and out; shorter sequences by attention.has_seqlens_q
  int64_t seqlen_k = 0;  ///< time steps of key and value; of the cache, where one is used: what a sequence has room for

  int64_t num_heads = 1;
  int64_t num_heads_kv = 1;  ///< divides num_heads; query head h reads h / (num_heads / num_heads_kv)

  int64_t query_size = 0;  ///< length of a vector of query; likewise key, value
  int64_t key_size = 0;
  int64_t value_size = 0;
  int64_t query_proj_size = 0;  ///< length of a head of q, its head_dim; 0: no projection, a head is the whole vector
  int64_t key_proj_size = 0;    ///< of k; what comes out must be as long as q's head
  int64_t value_proj_size = 0;  ///< of v: head_dim_v
  int64_t out_proj_size = 0;    ///< length of a vector of out; 0: no projection, it is num_heads * head_dim_v
  bool query_bias = false;      ///< a bias on that projection
  bool key_bias = false;
  bool value_bias = false;
  bool out_bias = false;

  bool residual = false;          ///< a tensor of out's shape is added to it
  double output_dropout_p = 0;    ///< 0..1: dropout after the output's bias, before the residual; in training only
  bool has_windows = false;       ///< window_lo and window_hi [seqlen_q] come with each call
  DType dtype = DType::kFloat32;  ///< of all tensors and weights: float32, bfloat16, float16, float64

  /// Keys and values live in a cache's pages (polyhead/cache.h): they are projected, turned and stored as they come, a query
  /// turns likewise, and attention reads the pages. Inference alone. num_heads_kv, head_dim and head_dim_v are the layer's;
  /// key_dtype and value_dtype are `dtype` (not float64), or one that has scales. seqlen_k is a multiple of page_size. One
  /// beam: beams are sequences of the batch, which may share pages. seqlens_k comes with each call, and
  /// LayerForwardArgs::cache.
  std::optional<KvCacheDesc> cache = {};
  /// With a cache, time steps of key and value in a call that gives them. 0: seqlen_q, they are the tokens of query. Else
  /// tokens of another sequence, without rotary positions: those of an encoder, which one call stores and all read.
  int64_t seqlen_new = 0;

  /// Its options: scale, softcap, causal, window, align, query_offset(s), attn_mask and attn_bias (the same for all
  /// beams), ALiBi, lengths, dropout_p (in training only), return_weights. Its sizes and dtype are set by the layer;
  /// packed and return_column_sums are refused.
  AttentionDesc attention = {};

  bool operator==(const LayerDesc&) const = default;  ///< field by field
};

/// The weights and biases of a layer, in the order in which they lie in one buffer.
enum class WeightKind : int32_t {
  kQuery = 0,
  kKey = 1,
  kValue = 2,
  kOut = 3,
  kQueryBias = 4,
  kKeyBias = 5,
  kValueBias = 6,
  kOutBias = 7,
};
inline constexpr int kNumWeightKinds = 8;

/// Where a weight lies in the buffer. y = x W, so dims are [size of x, size of y]; a bias is [size of y].
struct WeightLayout {
  bool present = false;  ///< false: this layer has no such weight, all else is 0
  int64_t offset = 0;    ///< elements from the start of the buffer
  int32_t ndim = 0;      ///< 2; of a bias 1
  int64_t dims[2] = {};
  int64_t strides[2] = {};  ///< in elements
};

/// Weights (or their gradients) as tensors: parts of one buffer (Layer::weights_in) or arrays of the caller's own, with
/// any strides: torch's [out, in] matrix is a view with swapped dims. Those that the layer does not have are not given.
/// Projections of one input whose matrices lie side by side, column after column, are computed in one product.
struct LayerWeights {
  Tensor query = {};       ///< [query_size, num_heads * query_proj_size]
  Tensor key = {};         ///< [key_size, num_heads_kv * key_proj_size]
  Tensor value = {};       ///< [value_size, num_heads_kv * value_proj_size]
  Tensor out = {};         ///< [num_heads * head_dim_v, out_proj_size]
  Tensor query_bias = {};  ///< [num_heads * query_proj_size]
  Tensor key_bias = {};    ///< [num_heads_kv * key_proj_size]
  Tensor value_bias = {};  ///< [num_heads_kv * value_proj_size]
  Tensor out_bias = {};    ///< [out_proj_size]

  /// The weight of that kind.
  const Tensor& operator[](WeightKind kind) const {
    const Tensor* const all[kNumWeightKinds] = {&query,      &key,      &value,      &out,
                                                &query_bias, &key_bias, &value_bias, &out_bias};
    return *all[static_cast<int>(kind)];
  }
  Tensor& operator[](WeightKind kind) { return const_cast<Tensor&>(std::as_const(*this)[kind]); }
};

/// What a call of a layer with desc.cache is given besides. seqlens_k, given with it, counts each sequence's keys, those of this
/// call included. With align kBottomRight the last query stands on the last of them.
struct LayerCacheArgs {
  KvTensors pool = {};     ///< as KvCache::tensors has it
  Tensor page_table = {};  ///< [batch, seqlen_k / page_size], int32 or int64, as in ForwardArgs
  /// [batch, seqlen_new, or seqlen_q where that is 0], int32 or int64: where each token of key and value goes; -1: nowhere.
  /// No slot twice. Given if key and value are; without all three the pages are read as they are.
  Tensor slots = {};
  Tensor positions = {};  ///< [batch, seqlen_q], int32 or int64: rows of cos and sin. Given if cache.rotary_dim > 0
  Tensor cos = {};        ///< [positions, rotary_dim / 2], float32. Given likewise
  Tensor sin = {};        ///< the same of the sines
};

/// The tensors of one forward call, all of desc.dtype unless told. Vectors are innermost; batch, beam and time may lie in
/// any order in memory, as the strides tell. A tensor without its beam dim counts as one with a single beam; without
/// one, lengths and offsets are those of every beam. Outputs must not overlap themselves, each other or an input.
struct LayerForwardArgs {
  Tensor query = {};     ///< [batch, beam, seqlen_q, query_size] or [batch, seqlen_q, query_size]
  Tensor key = {};       ///< [batch, beam_kv, seqlen_k, key_size] or [batch, seqlen_k, key_size]
  Tensor value = {};     ///< [batch, beam_kv, seqlen_k, value_size] or [batch, seqlen_k, value_size]
  Tensor residual = {};  ///< as out, if desc.residual
  LayerWeights weights = {};

  Tensor attn_mask = {};      ///< as in ForwardArgs: 4-D with the desc's dims
  Tensor attn_bias = {};      ///< likewise
  Tensor alibi_slopes = {};   ///< [num_heads] or [batch, num_heads], float32
  Tensor sink_logits = {};    ///< [num_heads], float32 (float64 with float64 inputs)
  Tensor seqlens_q = {};      ///< [batch, beam] or [batch], int32 or int64. Padding passes on no gradient
  Tensor seqlens_k = {};      ///< [batch, beam_kv] or [batch], likewise
  Tensor query_offsets = {};  ///< [batch, beam] or [batch], likewise
  Tensor window_lo = {};  ///< [seqlen_q], likewise: query i sees keys window_lo[i] <= j < window_hi[i]; cut to the keys
  Tensor window_hi = {};  ///< [seqlen_q], likewise
  std::span<const Tensor> captures = {};  ///< those of desc.attention.program, as in ForwardArgs

  /// Which random bits dropout draws (polyhead/dropout.h): in training, a dropout above 0 needs a seed, any number, and
  /// the two must differ in seed or offset, or they would drop the same places. Of dropout on P; beam n draws with
  /// dropout_offset + n.
  std::optional<uint64_t> dropout_seed = {};
  uint32_t dropout_offset = 0;
  /// Of dropout on the output: kept as dropout_mask([batch, beam, seqlen_q, out size]) tells.
  uint32_t output_dropout_offset = 0;
  std::optional<uint64_t> output_dropout_seed = {};

  Tensor out = {};           ///< [batch, beam, seqlen_q, out size] or [batch, seqlen_q, out size]
  Tensor attn_weights = {};  ///< as return_weights says: [batch, beam, num_heads, seqlen_q, seqlen_k], or averaged
                             ///< [batch, beam, seqlen_q, seqlen_k]; without beam where that is 1

  /// Optional, inference only: k and v, kept for later steps: [batch, beam_kv, seqlen_k, num_heads_kv, head_dim] and
  /// [..., head_dim_v]; num_heads_kv is 1 where that projection is off. forward() writes all of them.
  Tensor key_cache = {};
  Tensor value_cache = {};

  /// One step of decoding, inference only: 0 .. seqlen_q - 1. Query, residual, out and attn_weights then have one time
  /// step, `step`; out is what forward would write there. key and value have one time step too, which becomes step
  /// `step` of the caches, and keys behind it are hidden; or they are not given: the caches stand, as forward left them
  /// (attention to another sequence). Masks, windows and lengths are those of the whole, and so is what a program is told:
  /// its q is `step`; one that reads q or offset captures 7 tensors at most. -1: all steps, as above.
  int64_t step = -1;

  /// With desc.cache: query are seqlen_q new time steps, or the first seqlens_q of them, behind which slots and positions
  /// are not looked at either (slots, if seqlen_new is 0). Tokens that come at most 12 a call have the bits of one by one;
  /// more are summed in another order. On an error no page has been written.
  LayerCacheArgs cache = {};

  void* reserve =
      nullptr;  ///< null: inference. Else at least Layer::reserve_bytes(), aligned to 64: what backward needs
  size_t reserve_bytes = 0;
  void* workspace = nullptr;  ///< at least Layer::workspace_bytes(), aligned to 64 bytes; contents need not be kept
  size_t workspace_bytes = 0;

  /// Optional: the matrices of `weights` as Layer::prepack_weights() wrote them. Forward then reads these, for the same
  /// bits in less time, and of `weights` the biases alone; the backward calls read `weights`.
  const void* prepacked_weights = nullptr;
  size_t prepacked_weights_bytes = 0;

  /// Where this call runs, within what the layer was made for: left out, as it was made. Backward calls run where theirs says.
  Where where = {};
};

/// The tensors of backward_data and of backward_weights. The residual's gradient is grad_out itself.
struct LayerBackwardArgs {
  /// What the forward call was given, with its reserve; out and attn_weights are not looked at. The workspace is this
  /// call's: Layer::backward_workspace_bytes().
  LayerForwardArgs forward = {};
  Tensor grad_out = {};  ///< as out, any strides. In padding it is not looked at

  /// Written by backward_data, which overwrites; each is optional: shape of the input. Inputs that are one tensor may
  /// have one gradient: where two of these are the same view, it holds the sum.
  Tensor grad_query = {};
  Tensor grad_key = {};
  Tensor grad_value = {};
  Tensor grad_attn_bias = {};                  ///< shape and dtype of attn_bias
  Tensor grad_alibi_slopes = {};               ///< shape of alibi_slopes, float32
  Tensor grad_sink_logits = {};                ///< shape and dtype of sink_logits
  std::span<const Tensor> grad_captures = {};  ///< as in BackwardArgs

  /// Written by backward_weights; each is optional, at least one is given.
  LayerWeights grad_weights = {};
  bool accumulate = false;  ///< backward_weights: true adds to what grad_weights hold, false overwrites
};

struct LayerState;  // src/layer/state.h
class AttentionBlock;
struct AttentionBlockDesc;

/// A checked desc with its plans. Immutable: one layer may run on many threads at once, each call with its own tensors,
/// workspace and reserve. Running it allocates nothing. Copies share what they hold.
class POLYHEAD_API Layer {
 public:
  const LayerDesc& desc() const;
  const char* kernel_name() const;  ///< of the attention

  int64_t out_size() const;  ///< length of a vector of out

  size_t weights_bytes() const;
  WeightLayout weight_layout(WeightKind kind) const;
  /// The tensors of a buffer of weights_bytes(), aligned to its elements.
  LayerWeights weights_in(void* buffer) const;

  /// The matrices as products read them, which costs each forward call a pass over them where they are not prepacked. For
  /// weights that stay as they are over many calls: prepack once, into memory of prepacked_weights_bytes() aligned to 64, and
  /// give it to each. Layers that agree in sizes of vectors and projections, dtype and kernel may share it.
  size_t prepacked_weights_bytes() const;
  Status prepack_weights(const LayerWeights& weights, void* prepacked, size_t bytes, const Where& where = {}) const;

  size_t workspace_bytes() const;  ///< of forward
  size_t backward_workspace_bytes() const;
  size_t reserve_bytes() const;

  /// Checks `args` against the desc, then computes. On an error no output has been touched.
  Status forward(const LayerForwardArgs& args) const;

  /// The gradients of the inputs that `args` asks for, after forward with a reserve. Completes the reserve for
  /// backward_weights, also where no gradient is asked for.
  Status backward_data(const LayerBackwardArgs& args) const;

  /// The gradients of the weights that `args` asks for, after backward_data with the same reserve.
  Status backward_weights(const LayerBackwardArgs& args) const;

 private:
  friend Result<Layer> layer(const LayerDesc&, const PlanOptions&);
  friend class AttentionBlock;  // polyhead/block.h, likewise its maker
  friend Result<AttentionBlock> attention_block(const AttentionBlockDesc&, const PlanOptions&);
  Layer() = default;
  std::shared_ptr<const LayerState> state_;
};

/// Checks `desc` (the error names the field and the numbers that disagree) and picks kernels, as plan() does. A forced one
/// must have matrix products too; else the error names those that have.
POLYHEAD_API Result<Layer> layer(const LayerDesc& desc, const PlanOptions& options = {});

}  // namespace polyhead
