// Weights of other frameworks, in and out of a layer.
//
// A source (torch's nn.MultiheadAttention, GPT-2, ...) stores the weights of one attention layer in arrays with names and
// shapes of its own: transposed, packed side by side, interleaved head by head. Each weight is a strided view of one of
// those arrays, so import and export are one copy, with a conversion of the dtype where they differ, and most weights
// can be used where they are. weight_sources() lists the sources; docs/weights.md has the table and its traps.
//
//   LayerDesc desc;
//   desc.seqlen_q = desc.seqlen_k = 128;
//   desc.num_heads = 32, desc.num_heads_kv = 0;                               // 0: found from the arrays, as all sizes
//   const std::vector<NamedTensor> arrays = ...;                              // a checkpoint, any order, other names too
//   Result<LayerDesc> full = layer_desc_of("llama", arrays, desc, "model.layers.0.self_attn.");
//   Result<Layer> l = layer(*full);
//   Status status = import_weights("llama", *full, arrays, l->weights_in(buffer), "model.layers.0.self_attn.");
//
// Arrays of a checkpoint are data: every shape, dtype, pointer and overlap is checked before anything is written, and an
// error names the array, what was expected and what came.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "polyhead/api.h"
#include "polyhead/layer.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead {

/// An array of a checkpoint: float32, bfloat16, float16 or float64, on the CPU, any strides. One that is not given has a
/// name only: enough where that one is not looked at, and to say in an error what there was.
struct NamedTensor {
  std::string name;
  Tensor tensor = {};
};

/// What the scores Q K^T are multiplied by in a source's own forward.
enum class SourceScale : int32_t {
  kInverseRoot,  ///< 1 / sqrt(head_dim), a layer's default
  kOne,          ///< 1: layer_desc_of() sets AttentionDesc::scale
  kOwn,          ///< none: what AttentionDesc::scale says
  kAsked,        ///< whatever its caller says; there is no default: set AttentionDesc::scale
};

/// A way to store an attention layer's weights.
struct WeightSource {
  const char* name = nullptr;    ///< "llama"
  const char* module = nullptr;  ///< whose it is: "Hugging Face LlamaAttention, Mistral, Qwen"
  SourceScale scale = SourceScale::kInverseRoot;
  /// Default epsilon of the norm beside it, which is no part of a layer (AttentionBlock takes it); 0: the model's own
  /// configuration tells.
  double norm_epsilon = 0;
  /// Arrays that change its results and that a layer has no place for: the caller applies them, and leaves them out of
  /// what is imported.
  std::span<const char* const> extras = {};
};

/// All sources; "polyhead" is the layer's own form, for files. Never changes.
POLYHEAD_API std::span<const WeightSource> weight_sources();

/// The names of all arrays that a source may have, without a prefix.
POLYHEAD_API Result<std::vector<std::string>> weight_arrays(std::string_view source);

/// Where a source stores a weight. The weight as a view has the dims
/// - of query, key and value: [size of the input, heads, head_dim]; of their biases: [heads, head_dim];
///   head_dim as [2, head_dim / 2] where RoPE's pairs are stored otherwise (llama_meta);
/// - of out: [num_heads, head_dim_v, out_proj_size]; of its bias: [out_proj_size].
///
/// Dim i of the view runs along dim axis[i] of the array, step[i] apart; the weight starts at index `start` of start_axis.
struct WeightView {
  WeightKind kind = WeightKind::kQuery;
  const char* array = nullptr;  ///< its name, without a prefix
  int32_t array_ndim = 0;
  int64_t array_dims[Tensor::kMaxDims] = {};
  int32_t ndim = 0;
  int64_t dims[Tensor::kMaxDims] = {};
  int32_t axis[Tensor::kMaxDims] = {};
  int64_t step[Tensor::kMaxDims] = {};
  int32_t start_axis = 0;
  int64_t start = 0;

  /// The weight in `tensor`, which has the array's dims, and any strides.
  POLYHEAD_API Tensor in(const Tensor& tensor) const;
};

/// The views of all weights that `desc` has, by kind. kInvalidArgument if the source cannot store such a layer: "gpt2
/// keeps num_heads_kv equal to num_heads, not 2 and 8". Of desc, sizes, heads and biases are looked at.
POLYHEAD_API Result<std::vector<WeightView>> weight_views(std::string_view source, const LayerDesc& desc);

/// `known` with what the arrays tell. To be known: num_heads. Found where they are 0: num_heads_kv, query_size, key_size,
/// value_size, the four proj_sizes. A bias is set if its array is there, the scale if the source fixes one that is not
/// the default. Names of arrays are `prefix` and then those of the source; other names are passed over. What no array
/// tells: head_dim_v is head_dim, num_heads_kv is num_heads.
POLYHEAD_API Result<LayerDesc> layer_desc_of(std::string_view source, std::span<const NamedTensor> arrays,
                                             const LayerDesc& known, std::string_view prefix = {});

/// Copies the weights that `desc` has out of the arrays of `source` into `weights`, each of which may have another dtype.
/// Same dtype: same bits.
POLYHEAD_API Status import_weights(std::string_view source, const LayerDesc& desc, std::span<const NamedTensor> arrays,
                                   const LayerWeights& weights, std::string_view prefix = {});

/// Copies the weights that `desc` has into the arrays of `source`, whose shapes weight_views() tells.
POLYHEAD_API Status export_weights(std::string_view source, const LayerDesc& desc, const LayerWeights& weights,
                                   std::span<const NamedTensor> arrays, std::string_view prefix = {});

/// The arrays themselves as a layer's weights (or, with gradients' arrays, as its grad_weights): nothing is copied. All
/// must be of desc.dtype. kInvalidArgument for a weight whose heads no two-dimensional view can reach, as those that are
/// interleaved head by head (gpt_neox): import these.
POLYHEAD_API Result<LayerWeights> bind_weights(std::string_view source, const LayerDesc& desc,
                                               std::span<const NamedTensor> arrays, std::string_view prefix = {});

}  // namespace polyhead
