#include "layer_call.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "layer_or_block.h"
#include "pages.h"
#include "scalars.h"

namespace polyhead::python {
namespace {

constexpr const char* kIntegers = "int32 or int64";
constexpr ArrayArgument kQueryVectors = {"query", kFloats, 3, 3, "[batch, seqlen_q, query_size]"};
constexpr ArrayArgument kKeyVectors = {"key", kFloats, 3, 3, "[batch, seqlen_k, key_size]"};
constexpr ArrayArgument kValueVectors = {"value", kFloats, 3, 3, "[batch, seqlen_k, value_size]"};
constexpr ArrayArgument kLoArray = {"window_lo", kIntegers, 1, 1, "[seqlen_q]"};
constexpr ArrayArgument kHiArray = {"window_hi", kIntegers, 1, 1, "[seqlen_q]"};
constexpr ArrayArgument kKeyCacheArray = {"caches.key", kFloats, 4, 4, "[batch, seqlen_k, num_heads_kv, head_dim]"};
constexpr ArrayArgument kValueCacheArray = {"caches.value", kFloats, 4, 4,
                                            "[batch, seqlen_k, num_heads_kv, head_dim_v]"};
constexpr const char* kWeightNames[kNumWeightKinds] = {"query_weight", "key_weight", "value_weight", "out_weight",
                                                       "query_bias",   "key_bias",   "value_bias",   "out_bias"};

// What both directions are given.
class LayerCall : public Options {
 public:
  explicit LayerCall(PyObject* const* arguments) : Options(arguments), place_(arguments[kQuery], arguments[kStream]) {
    layer_args_.query = view_of(arguments[kQuery], kQueryVectors, held_[kQuery]);
    layer_args_.key = optional_array(kKey, kKeyVectors);
    layer_args_.value = optional_array(kValue, kValueVectors);
    read_options();
    compute_at(place_);
    layer_args_.where = args_.where;
    read_weights();
    read_norm();
    read_windows();
  }

  // The layer, once the sizes of its time are known.
  LayerOrBlock made() {
    layer_desc_.attention = desc_;
    return checked(LayerOrBlock::made(layer_desc_, norm_desc_, args_.where, kernel()));
  }

 protected:
  void set_sizes(int64_t seqlen_q, int64_t seqlen_k) {
    layer_desc_.seqlen_q = seqlen_q;
    layer_desc_.seqlen_k = seqlen_k;
  }
  // Self-attention's key, and the value that is key. A block makes them of its query itself.
  void fill_in_key_and_value() {
    if (!layer_args_.key.given() && !norm_desc_) layer_args_.key = layer_args_.query;
    if (!layer_args_.value.given()) layer_args_.value = layer_args_.key;
  }
  int64_t num_keys() const { return (layer_args_.key.given() ? layer_args_.key : layer_args_.query).dims[1]; }

  const Place place_;
  LayerDesc layer_desc_;
  LayerForwardArgs layer_args_;
  std::optional<NormDesc> norm_desc_;  // of a block
  NormWeights norm_;

 private:
  void read_weights();
  void read_norm();
  void read_windows();

  std::array<Held, kNumWeightKinds + 2> held_weights_;
  std::array<Held, 2> held_windows_;
};

// The Python class has checked that the weights fit each other.
void LayerCall::read_weights() {
  LayerDesc& d = layer_desc_;
  for (int i = 0; i < kNumWeightKinds; ++i) {
    PyObject* const weight = arguments_[kLayerWeights + i];
    const int dims = i < 4 ? 2 : 1;
    if (weight == Py_None) continue;
    Tensor& view = layer_args_.weights[static_cast<WeightKind>(i)];
    view = view_of(weight, {kWeightNames[i], kFloats, dims, dims, ""}, held_weights_[static_cast<size_t>(i)]);
  }
  const LayerWeights& w = layer_args_.weights;
  d.num_heads = int64_argument(arguments_[kNumHeads], "num_heads");
  d.num_heads_kv = int64_argument(arguments_[kNumHeadsKv], "num_heads_kv");
  if (d.num_heads < 1 || d.num_heads_kv < 1) bad_value("num_heads and num_heads_kv must be 1 or more");
  d.query_size = w.query.dims[0];
  d.key_size = w.key.dims[0];
  d.value_size = w.value.dims[0];
  d.query_proj_size = w.query.dims[1] / d.num_heads;
  d.key_proj_size = w.key.dims[1] / d.num_heads_kv;
  d.value_proj_size = w.value.dims[1] / d.num_heads_kv;
  d.out_proj_size = w.out.given() ? w.out.dims[1] : 0;
  d.query_bias = w.query_bias.given();
  d.key_bias = w.key_bias.given();
  d.value_bias = w.value_bias.given();
  d.out_bias = w.out_bias.given();
  d.dtype = w.query.dtype;
  d.batch = layer_args_.query.dims[0];
}

void LayerCall::read_norm() {
  if (arguments_[kLayerNormKind] == Py_None) return;
  NormDesc& norm = norm_desc_.emplace();
  norm.kind = static_cast<NormKind>(int64_argument(arguments_[kLayerNormKind], "norm_kind"));
  norm.pre = flag_argument(arguments_[kLayerNormFirst], "norm_first");
  norm.eps = real_argument(arguments_[kLayerNormEps], "norm_eps");
  layer_desc_.residual = flag_argument(arguments_[kLayerResidual], "residual");
  const auto vector = [&](int position, const char* name, Held& held) {
    return arguments_[position] == Py_None ? Tensor()
                                           : view_of(arguments_[position], {name, kFloats, 1, 1, "[size]"}, held);
  };
  norm_.gamma = vector(kLayerNormWeight, "norm_weight", held_weights_[kNumWeightKinds]);
  norm_.beta = vector(kLayerNormBias, "norm_bias", held_weights_[kNumWeightKinds + 1]);
  norm.gamma = norm_.gamma.given();
  norm.beta = norm_.beta.given();
}

void LayerCall::read_windows() {
  LayerForwardArgs& a = layer_args_;
  PyObject *const lo = arguments_[kWindowLo], *const hi = arguments_[kWindowHi];
  if ((lo == Py_None) != (hi == Py_None)) {
    bad_value("window_%s is given without window_%s, both must be given or none", lo == Py_None ? "hi" : "lo",
              lo == Py_None ? "lo" : "hi");
  }
  if (lo != Py_None) {
    a.window_lo = view_of(lo, kLoArray, held_windows_[0]);
    a.window_hi = view_of(hi, kHiArray, held_windows_[1]);
    layer_desc_.has_windows = true;
  }
  a.attn_mask = args_.attn_mask;
  a.attn_bias = args_.attn_bias;
  a.alibi_slopes = args_.alibi_slopes;
  a.sink_logits = args_.sink_logits;
  a.captures = args_.captures;
  a.seqlens_q = args_.seqlens_q;
  a.seqlens_k = args_.seqlens_k;
  a.query_offsets = args_.query_offsets;
  a.dropout_seed = args_.dropout_seed;
  a.dropout_offset = args_.dropout_offset;
  layer_desc_.output_dropout_p = real_argument(arguments_[kOutputDropoutP], "output_dropout_p");
  if (PyObject* seed = arguments_[kOutputDropoutSeed]; seed != Py_None) a.output_dropout_seed = seed_argument(seed);
  a.output_dropout_offset = kOutputDropoutOffset;
  desc_.return_weights = return_weights_argument(arguments_[kLayerReturnWeights]);
}

class LayerForwardCall : public LayerCall {
 public:
  explicit LayerForwardCall(PyObject* const* arguments) : LayerCall(arguments) {
    LayerForwardArgs& a = layer_args_;
    a.step = int64_argument(arguments[kStep], "step");
    if (arguments[kKeyCache] != Py_None) {
      a.key_cache = writable_view_of(arguments[kKeyCache], kKeyCacheArray, held_caches_[0]);
      a.value_cache = writable_view_of(arguments[kValueCache], kValueCacheArray, held_caches_[1]);
    }
    if (arguments[kLayerCache] != Py_None) {
      read_cache(arguments + kLayerCache);
    } else if (a.step < 0) {
      fill_in_key_and_value();
      set_sizes(a.query.dims[1], num_keys());
      for (Tensor* cache : {&a.key_cache, &a.value_cache}) {  // which have room for these keys, and more
        if (cache->given()) cache->dims[1] = num_keys();
      }
    } else {
      if (flag_argument(arguments[kStepAppends], "append")) fill_in_key_and_value();
      set_sizes(int64_argument(arguments[kStepSeqlenQ], "caches.seqlen_q"), a.key_cache.dims[1]);
    }
  }

  nb::object run();

 private:
  void read_cache(PyObject* const* arguments);

  std::array<Held, 2> held_caches_;
  std::optional<CacheArrays> pages_;
  std::array<Held, 5> held_of_pages_;
};

// Key that is not given is query, where there are slots for it.
void LayerForwardCall::read_cache(PyObject* const* arguments) {
  const CacheArrays& pages = pages_.emplace(arguments);
  LayerDesc& d = layer_desc_;
  LayerForwardArgs& a = layer_args_;
  LayerCacheArgs& c = a.cache;
  auto& held = held_of_pages_;
  d.cache = pages.cache().desc();
  c.pool = pages.pool;
  c.page_table = pages.view(kCachePageTable, {"page_table", kIntegers, 2, 2, "[batch, pages of a sequence]"}, held[0]);
  if (!c.page_table.given()) bad_value("page_table must be given with a cache");
  c.slots = pages.view(kCacheSlots, {"slots", kIntegers, 2, 2, "[batch, new time steps]"}, held[1]);
  c.positions = pages.view(kCachePositions, {"positions", kIntegers, 2, 2, "[batch, seqlen_q]"}, held[2]);
  c.cos = pages.view(kCacheCos, kCosTable, held[3]);
  c.sin = pages.view(kCacheSin, kSinTable, held[4]);
  const bool another = a.key.given() && d.cache->rotary_dim == 0;
  d.seqlen_new = another ? a.key.dims[1] : 0;
  if (c.slots.given()) fill_in_key_and_value();
  AttentionDesc of_pages;
  set_pages(c.pool.key, c.page_table, of_pages);
  set_sizes(a.query.dims[1], of_pages.seqlen_k);
}

nb::object LayerForwardCall::run() {
  const LayerOrBlock layer = made();
  const LayerDesc& d = layer.desc();
  LayerForwardArgs& a = layer_args_;
  const int64_t steps = a.query.dims[1];  // one of a step, whatever d says
  const bool per_head = d.attention.return_weights == ReturnWeights::kPerHead;
  const bool keep = flag_argument(arguments_[kKeep], "training");
  Results results("query", arguments_[kQuery], d.dtype);
  nb::object weights = nb::none(), reserve = nb::none();
  a.out = Tensor(nullptr, d.dtype, {d.batch, steps, layer.out_size()});
  nb::object out = results.make(a.out);
  if (d.attention.return_weights != ReturnWeights::kNone) {
    a.attn_weights = per_head ? Tensor(nullptr, d.dtype, {d.batch, d.num_heads, steps, d.seqlen_k})
                              : Tensor(nullptr, d.dtype, {d.batch, steps, d.seqlen_k});
    weights = results.make(a.attn_weights);
  }
  if (keep) {
    Tensor words(nullptr, DType::kInt64, {static_cast<int64_t>((layer.reserve_bytes() + 7) / 8)});
    reserve = place_.on_cuda() ? results.make(words) : new_numpy_array(words);
    a.reserve = words.data;
    a.reserve_bytes = layer.reserve_bytes();
  }
  a.workspace_bytes = layer.workspace_bytes();
  place_.run_in_workspace(a.workspace_bytes, [&](void* workspace) {
    a.workspace = workspace;
    return layer.forward(a, norm_);
  });
  return nb::make_tuple(out, weights, reserve);
}

class LayerBackwardCall : public LayerCall {
 public:
  explicit LayerBackwardCall(PyObject* const* arguments) : LayerCall(arguments) {
    own_key_ = layer_args_.key.given();
    own_value_ = layer_args_.value.given();
    fill_in_key_and_value();
    set_sizes(layer_args_.query.dims[1], num_keys());
    backward_.grad_out = view_of(arguments[kLayerGradOut], {"grad_out", kFloats, 3, 3, "the shape of out"}, held_own_);
    size_t count = 0;
    const auto gradient = [&](int position, const char* name, int dims) {
      PyObject* const array = arguments[position];
      Held& held = held_gradients_[count++];
      return array == Py_None ? Tensor() : writable_view_of(array, {name, kFloats, dims, dims, ""}, held);
    };
    for (int i = 0; i < kNumWeightKinds; ++i) {
      backward_.grad_weights[static_cast<WeightKind>(i)] =
          gradient(kLayerGradWeights + i, kWeightNames[i], i < 4 ? 2 : 1);
    }
    grad_norm_ = {gradient(kLayerGradNormWeight, "norm_weight", 1), gradient(kLayerGradNormBias, "norm_bias", 1)};
  }

  nb::object run();

 private:
  nb::object new_gradient(int bit, Position position, Tensor input, Tensor* gradient) const {
    if ((needs_ >> bit & 1) == 0) return nb::none();
    nb::object array = Results("query", arguments_[position], input.dtype).make(input);
    *gradient = input;
    return array;
  }

  nb::dict new_captured_gradients();

  std::array<Tensor, Program::kMostCaptures> grad_captures_;
  bool own_key_ = false, own_value_ = false;
  int64_t needs_ = 0;
  LayerBackwardArgs backward_;
  NormWeights grad_norm_;
  Held held_own_;
  std::array<Held, kNumWeightKinds + 2> held_gradients_;
};

// The Python class has checked the names.
nb::dict LayerBackwardCall::new_captured_gradients() {
  nb::dict gradients;
  PyObject* const names = arguments_[kLayerNeedsCaptured];
  for (size_t i = 0; i < args_.captures.size(); ++i) {
    const char* const name = desc_.program->captures()[i].name.c_str();
    if (PySequence_Contains(names, nb::str(name).ptr()) != 1) continue;
    Tensor gradient = captures_.given(i);
    gradients[name] = Results(name, captures_.array(i), gradient.dtype).make(gradient);
    grad_captures_[i] = as_capture(gradient);
  }
  backward_.grad_captures = {grad_captures_.data(), args_.captures.size()};
  return gradients;
}

nb::object LayerBackwardCall::run() {
  const LayerOrBlock layer = made();
  LayerForwardArgs& a = layer_args_;
  needs_ = int64_argument(arguments_[kLayerNeeds], "needs");
  nb::object made_arrays = nb::make_tuple(
      new_gradient(0, kQuery, a.query, &backward_.grad_query), new_gradient(1, kKey, a.key, &backward_.grad_key),
      new_gradient(2, kValue, a.value, &backward_.grad_value),
      new_gradient(3, kAttnBias, given_attn_bias(), &backward_.grad_attn_bias),
      new_gradient(4, kAlibiSlopes, a.alibi_slopes, &backward_.grad_alibi_slopes),
      new_gradient(5, kSinkLogits, a.sink_logits, &backward_.grad_sink_logits), new_captured_gradients());
  if (backward_.grad_attn_bias.given()) backward_.grad_attn_bias = widened_to_4d(backward_.grad_attn_bias);
  if (!own_key_ && !norm_desc_) backward_.grad_key = backward_.grad_query;
  if (!own_value_) backward_.grad_value = backward_.grad_key;

  Held held;
  const Tensor reserve = view_of(arguments_[kReserve], {"reserve", "int64", 1, 1, "what forward returned"}, held);
  a.reserve = reserve.data;
  a.reserve_bytes = layer.reserve_bytes();
  a.workspace_bytes = layer.backward_workspace_bytes();
  backward_.forward = a;
  place_.run_in_workspace(a.workspace_bytes, [&](void* workspace) {
    backward_.forward.workspace = workspace;
    return layer.backward(backward_, norm_, grad_norm_);
  });
  return made_arrays;
}

}  // namespace

nb::object layer_forward(PyObject* const* arguments) { return LayerForwardCall(arguments).run(); }

nb::object layer_backward(PyObject* const* arguments) { return LayerBackwardCall(arguments).run(); }

}  // namespace polyhead::python
