#include "layer/checks_args.h"

#include "attention/checks.h"
#include "attention/checks_operands.h"
#include "contract/sequences.h"
#include "core/sentence.h"
#include "layer/call.h"
#include "layer/packed.h"

namespace polyhead {
namespace {

constexpr const char* kInputNames[] = {"query", "key", "value"};
constexpr const char* kInputSizes[] = {"query_size", "key_size", "value_size"};
constexpr const char* kWeightNames[] = {"weights.query",      "weights.key",        "weights.value",
                                        "weights.out",        "weights.query_bias", "weights.key_bias",
                                        "weights.value_bias", "weights.out_bias"};
constexpr const char* kGradWeightNames[] = {
    "grad_weights.query",      "grad_weights.key",      "grad_weights.value",      "grad_weights.out",
    "grad_weights.query_bias", "grad_weights.key_bias", "grad_weights.value_bias", "grad_weights.out_bias"};

// Of WeightKind: matrices come first.
struct Kinds {
  int begin = 0, end = kNumWeightKinds;
};
constexpr Kinds kMatrices = {0, 4}, kBiases = {4, kNumWeightKinds};

class LayerOperands {
 public:
  LayerOperands(const LayerState& state, const LayerForwardArgs& args)
      : state_(state), desc_(state.desc), args_(args), operands_(state.asked) {}

  Status add_inputs();
  Status add_weights(Role role, const LayerWeights& weights, bool optional, Kinds kinds = {});
  Status add_packed(Role role, const void* packed, size_t bytes) {
    return polyhead::add_packed(operands_, role, state_.packed, packed, bytes, &packed_);
  }
  Status add_options();
  Status add_outputs();
  Status add_out_like(Role role, const char* name, const Tensor& t) {
    return add(role, name, t, {batch(), {"beam", desc_.beam}, steps_q(), {"out size", state_.out_size}});
  }
  Status add_input_like(Role role, const char* name, const Tensor& t, int i);
  Status add_caches();
  Status add_reserve();
  Status add_gradients(const LayerBackwardArgs& args);
  Status check_workspace(size_t needed) const {
    return operands_.check_workspace(args_.workspace, args_.workspace_bytes, needed);
  }

 private:
  Dim batch() const { return {"batch", desc_.batch}; }
  Dim steps_q() const { return is_step(args_) ? Dim{"one step,", 1} : Dim{"seqlen_q", desc_.seqlen_q}; }
  Status add(Role role, const char* name, const Tensor& t, Dims dims) {
    return operands_.add(role, name, t, desc_.dtype, dims);
  }
  Status add_integers(const char* name, const Tensor& t, bool asked, Dims dims);

  const LayerState& state_;
  const LayerDesc& desc_;
  const LayerForwardArgs& args_;
  Operands operands_;
  Tensor reserve_, packed_;  // memory as operands, which outlive their being added
};

Status LayerOperands::add_input_like(Role role, const char* name, const Tensor& t, int i) {
  const Projection& p = state_.projections[i];
  const Dim steps = is_step(args_) ? Dim{"one step,", 1} : Dim{i == kQuery ? "seqlen_q" : "seqlen_k", p.steps};
  return add(role, name, t, {batch(), {i == kQuery ? "beam" : "beam_kv", p.beams}, steps, {kInputSizes[i], p.size}});
}

Status LayerOperands::add_inputs() {
  const Tensor* const inputs[] = {&args_.query, &args_.key, &args_.value};
  if (is_step(args_) && args_.key.given() != args_.value.given()) {
    return invalid(
        sentence(args_.key.given() ? "value" : "key", " is missing: a step takes key and value, or neither"));
  }
  for (int i = 0; i < 3; ++i) {
    if (is_step(args_) && i != kQuery && !inputs[i]->given()) continue;
    if (Status status = add_input_like(Role::kInput, kInputNames[i], *inputs[i], i); !status.ok()) return status;
  }
  if (!desc_.residual) return unasked("residual", args_.residual);
  return add_out_like(Role::kInput, "residual", args_.residual);
}

Status LayerOperands::add_weights(Role role, const LayerWeights& weights, bool optional, Kinds kinds) {
  for (int kind = kinds.begin; kind < kinds.end; ++kind) {
    const Tensor& t = weight_of(weights, static_cast<WeightKind>(kind));
    const WeightLayout& layout = state_.weights[kind];
    const char* name = role == Role::kInput ? kWeightNames[kind] : kGradWeightNames[kind];
    if (!layout.present && t.given()) return invalid(sentence(name, " is given, but the layer has none"));
    if (!layout.present || (optional && !t.given())) continue;
    const Status status = layout.ndim == 1 ? add(role, name, t, {{"size", layout.dims[0]}})
                                           : add(role, name, t, {{"in", layout.dims[0]}, {"out", layout.dims[1]}});
    if (!status.ok()) return status;
  }
  return {};
}

Status LayerOperands::add_integers(const char* name, const Tensor& t, bool asked, Dims dims) {
  if (!asked) return unasked(name, t);
  if (t.given() && t.dtype != DType::kInt32 && t.dtype != DType::kInt64) {
    return invalid(sentence(name, " is ", dtype_name(t.dtype), ", expected int32 or int64"));
  }
  return operands_.add(Role::kInput, name, t, t.dtype, dims);
}

Status LayerOperands::add_options() {
  const AttentionDesc& asked = state_.asked;
  Status status = asked.attn_mask.given
                      ? operands_.add_broadcast(Role::kInput, "attn_mask", args_.attn_mask, asked.attn_mask)
                      : unasked("attn_mask", args_.attn_mask);
  if (status.ok()) {
    status = asked.attn_bias.given
                 ? operands_.add_broadcast(Role::kInput, "attn_bias", args_.attn_bias, asked.attn_bias)
                 : unasked("attn_bias", args_.attn_bias);
  }
  if (status.ok()) {
    status = asked.alibi_slopes_ndim > 0 ? operands_.add_slopes_like(Role::kInput, "alibi_slopes", args_.alibi_slopes)
                                         : unasked("alibi_slopes", args_.alibi_slopes);
  }
  const Dim beam{"beam", desc_.beam}, beam_kv{"beam_kv", desc_.beam_kv}, seqlen_q{"seqlen_q", desc_.seqlen_q};
  if (status.ok()) status = add_integers("seqlens_q", args_.seqlens_q, asked.has_seqlens_q, {batch(), beam});
  if (status.ok()) status = add_integers("seqlens_k", args_.seqlens_k, asked.has_seqlens_k, {batch(), beam_kv});
  if (status.ok()) {
    status = add_integers("query_offsets", args_.query_offsets, asked.has_query_offsets, {batch(), beam});
  }
  if (status.ok()) status = add_integers("window_lo", args_.window_lo, desc_.has_windows, {seqlen_q});
  if (status.ok()) status = add_integers("window_hi", args_.window_hi, desc_.has_windows, {seqlen_q});
  return status;
}

Status LayerOperands::add_outputs() {
  Status status = add_out_like(Role::kOutput, "out", args_.out);
  if (!status.ok()) return status;
  const Dim beam{"beam", desc_.beam}, heads{"num_heads", desc_.num_heads}, keys{"seqlen_k", desc_.seqlen_k};
  switch (state_.asked.return_weights) {
    case ReturnWeights::kNone: return unasked("attn_weights", args_.attn_weights);
    case ReturnWeights::kPerHead:
      return add(Role::kOutput, "attn_weights", args_.attn_weights, {batch(), beam, heads, steps_q(), keys});
    case ReturnWeights::kMean: break;
  }
  return add(Role::kOutput, "attn_weights", args_.attn_weights, {batch(), beam, steps_q(), keys});
}

Status LayerOperands::add_caches() {
  for (const int i : {kKey, kValue}) {
    const Projection& p = state_.projections[i];
    const char* name = i == kKey ? "key_cache" : "value_cache";
    const Tensor& cache = i == kKey ? args_.key_cache : args_.value_cache;
    if (!cache.given()) {
      if (is_step(args_)) return invalid(sentence(name, " is missing: a step needs it"));
      continue;
    }
    if (args_.reserve != nullptr) return invalid(sentence(name, " and a reserve are given: caches are for inference"));
    const Status status =
        add(Role::kOutput, name, cache,
            {batch(), {"beam_kv", p.beams}, {"seqlen_k", p.steps}, {"kept heads", p.on ? p.heads : 1}, {"dim", p.dim}});
    if (!status.ok()) return status;
  }
  return {};
}

// A reserve is an output like others, of bytes.
Status LayerOperands::add_reserve() {
  const size_t needed = state_.reserve.bytes;
  if (args_.reserve_bytes < needed) {
    return invalid(sentence("reserve_bytes is ", args_.reserve_bytes, ", needs ", needed));
  }
  if (reinterpret_cast<uintptr_t>(args_.reserve) % 64 != 0) return invalid("reserve is not aligned to 64 bytes");
  const auto bytes = static_cast<int64_t>(needed);
  reserve_ = Tensor(args_.reserve, DType::kBool, {bytes});
  return operands_.add(Role::kOutput, "reserve", reserve_, DType::kBool, {{"bytes", bytes}});
}

Status LayerOperands::add_gradients(const LayerBackwardArgs& args) {
  const Tensor* const gradients[] = {&args.grad_query, &args.grad_key, &args.grad_value};
  constexpr const char* kNames[] = {"grad_query", "grad_key", "grad_value"};
  for (int i = 0; i < 3; ++i) {
    if (!gradients[i]->given()) continue;
    const Projection& p = state_.projections[i];
    bool shared = false;  // one gradient for both
    for (int k = 0; k < i; ++k) {
      const Projection& other = state_.projections[k];
      const bool as_large = p.beams == other.beams && p.steps == other.steps && p.size == other.size;
      shared = shared || (as_large && same_view(*gradients[i], *gradients[k]));
    }
    if (shared) continue;
    if (Status status = add_input_like(Role::kOutput, kNames[i], *gradients[i], i); !status.ok()) return status;
  }
  const AttentionDesc& asked = state_.asked;
  const Tensor &bias = args.grad_attn_bias, &slopes = args.grad_alibi_slopes;
  Status status;
  if (bias.given() && !asked.attn_bias.given) return unasked("grad_attn_bias", bias);
  if (slopes.given() && asked.alibi_slopes_ndim == 0) return unasked("grad_alibi_slopes", slopes);
  if (bias.given()) status = operands_.add_broadcast(Role::kOutput, "grad_attn_bias", bias, asked.attn_bias);
  if (status.ok() && slopes.given()) {
    status = operands_.add_slopes_like(Role::kOutput, "grad_alibi_slopes", slopes);
  }
  return status;
}

// Lengths are data: they are looked at in every call.
Status check_lengths_of_beams(const LayerState& state, const LayerForwardArgs& args) {
  for (int64_t n = 0; n < state.desc.beam; ++n) {
    if (Status status = check_sequences(state.asked, sequence_args(args, n)); !status.ok()) return status;
  }
  return {};
}

Status check_step(const LayerState& state, const LayerForwardArgs& args) {
  if (args.step == -1) return {};
  const LayerDesc& desc = state.desc;
  if (args.step < -1) return invalid(sentence("step is ", args.step, ", must be -1 (all steps) or at least 0"));
  if (args.step >= desc.seqlen_q) {
    return invalid(sentence("step is ", args.step, ", must be less than seqlen_q ", desc.seqlen_q));
  }
  if (args.key.given() && args.step >= desc.seqlen_k) {
    return invalid(sentence("step is ", args.step, ", must be less than seqlen_k ", desc.seqlen_k,
                            " where key and value join the cache"));
  }
  if (args.reserve != nullptr) return invalid("step and a reserve are given: a step is inference");
  return {};
}

// What backward_data and backward_weights have in common.
Status add_backward_inputs(LayerOperands& operands, const LayerState& state, const LayerBackwardArgs& args) {
  const LayerForwardArgs& forward = args.forward;
  if (forward.step != -1) return invalid(sentence("step is ", forward.step, ", backward takes all steps: -1"));
  if (forward.reserve == nullptr) return invalid("reserve is null: backward needs what forward wrote there");
  if (forward.key_cache.given() || forward.value_cache.given()) {
    return invalid("key_cache or value_cache is given to backward: caches are for inference");
  }
  Status status = operands.add_inputs();
  if (status.ok()) status = operands.add_weights(Role::kInput, forward.weights, false);
  if (status.ok()) status = operands.add_options();
  if (status.ok()) status = operands.add_out_like(Role::kInput, "grad_out", args.grad_out);
  if (status.ok()) status = operands.add_reserve();
  if (status.ok()) status = check_lengths_of_beams(state, forward);
  return status;
}

Status check_reserve_of(const LayerState& state, const LayerForwardArgs& args, uint64_t stage) {
  return check_reserve(args.reserve, state.fingerprint, stage, dropouts_of(state.desc, args), "layer");
}

}  // namespace

bool same_view(const Tensor& a, const Tensor& b) {
  if (!a.given() || a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim) return false;
  for (int i = 0; i < a.ndim; ++i) {
    if (a.dims[i] != b.dims[i] || (a.dims[i] > 1 && a.strides[i] != b.strides[i])) return false;
  }
  return true;
}

Status check_forward(const LayerState& state, const LayerForwardArgs& args) {
  LayerOperands operands(state, args);
  Status status = check_step(state, args);
  if (status.ok()) status = operands.add_inputs();
  const bool packed = args.packed_weights != nullptr;
  if (status.ok()) status = operands.add_weights(Role::kInput, args.weights, false, packed ? kBiases : Kinds());
  if (status.ok() && packed) status = operands.add_packed(Role::kInput, args.packed_weights, args.packed_weights_bytes);
  if (status.ok()) status = operands.add_options();
  if (status.ok()) status = operands.add_outputs();
  if (status.ok()) status = operands.add_caches();
  if (status.ok() && args.reserve != nullptr) status = operands.add_reserve();
  if (status.ok()) status = operands.check_workspace(state.forward.bytes);
  if (status.ok() && packed) status = check_packed(state.packed, args.packed_weights);
  if (status.ok()) status = check_lengths_of_beams(state, args);
  if (status.ok() && args.reserve != nullptr) status = check_dropouts(dropouts_of(state.desc, args));
  return status;
}

Status check_pack_weights(const LayerState& state, const LayerWeights& weights, const void* packed, size_t bytes) {
  const LayerForwardArgs none;
  LayerOperands operands(state, none);
  const Status status = operands.add_weights(Role::kInput, weights, false, kMatrices);
  return status.ok() ? operands.add_packed(Role::kOutput, packed, bytes) : status;
}

Status check_backward_data(const LayerState& state, const LayerBackwardArgs& args) {
  LayerOperands operands(state, args.forward);
  Status status = add_backward_inputs(operands, state, args);
  if (status.ok()) status = operands.add_gradients(args);
  if (status.ok()) status = operands.check_workspace(state.backward.bytes);
  if (status.ok()) status = check_reserve_of(state, args.forward, ReserveHeader::kForwardDone);
  return status;
}

Status check_backward_weights(const LayerState& state, const LayerBackwardArgs& args, uint64_t stage) {
  bool any = false;
  for (int kind = 0; kind < kNumWeightKinds; ++kind) {
    any = any || weight_of(args.grad_weights, static_cast<WeightKind>(kind)).given();
  }
  if (!any) return invalid("no gradient is asked for: give one of grad_weights");
  LayerOperands operands(state, args.forward);
  Status status = add_backward_inputs(operands, state, args);
  if (status.ok()) status = operands.add_weights(Role::kOutput, args.grad_weights, true);
  if (status.ok()) status = operands.check_workspace(state.backward.bytes);
  if (status.ok()) status = check_reserve_of(state, args.forward, stage);
  return status;
}

}  // namespace polyhead
