// How a layer is made, and what it tells about itself.
#include <new>
#include <utility>

#include "attention/checks.h"
#include "core/sentence.h"
#include "layer/call_checks.h"
#include "layer/fingerprint.h"
#include "layer/layer_arguments.h"

namespace polyhead {
namespace {

constexpr int kOutMatrix = static_cast<int>(WeightKind::kOut);  // matrices come before biases

void set_sizes(LayerState& s) {
  const LayerDesc& d = s.desc;
  const auto dim = [](int64_t projected, int64_t size) { return projected > 0 ? projected : size; };
  s.projections[kQuery] = {"query",
                           d.query_size,
                           d.beam,
                           d.seqlen_q,
                           d.num_heads,
                           dim(d.query_proj_size, d.query_size),
                           d.query_proj_size > 0,
                           d.query_bias};
  s.projections[kKey] = {"key",
                         d.key_size,
                         d.beam_kv,
                         d.seqlen_k,
                         d.num_heads_kv,
                         dim(d.key_proj_size, d.key_size),
                         d.key_proj_size > 0,
                         d.key_bias};
  s.projections[kValue] = {"value",
                           d.value_size,
                           d.beam_kv,
                           d.seqlen_k,
                           d.num_heads_kv,
                           dim(d.value_proj_size, d.value_size),
                           d.value_proj_size > 0,
                           d.value_bias};
  s.joined = d.beam == d.beam_kv && d.seqlen_q == d.seqlen_k;
  for (const Projection& p : s.projections) s.joined = s.joined && p.on;
}

AttentionDesc sized_attention(const LayerState& s) {
  AttentionDesc attention = s.desc.attention;
  attention.batch = s.desc.batch;
  attention.seqlen_q = s.desc.seqlen_q;
  attention.seqlen_k = s.desc.seqlen_k;
  attention.num_heads = s.desc.num_heads;
  attention.num_heads_kv = s.desc.num_heads_kv;
  attention.head_dim = s.projections[kQuery].dim;
  attention.head_dim_v = s.projections[kValue].dim;
  attention.dtype = s.desc.dtype;
  attention.has_windows = s.desc.has_windows;
  return attention;
}

// One query, whose place among the keys comes with each call, as do the numbers of keys.
AttentionDesc one_step(AttentionDesc attention) {
  const bool diagonal =
      attention.causal || attention.window_left >= 0 || attention.window_right >= 0 || attention.alibi_slopes_ndim > 0;
  attention.seqlen_q = 1;
  attention.has_seqlens_q = false;
  attention.has_seqlens_k = true;
  attention.align = Align::kUnset;
  attention.query_offset.reset();
  attention.has_query_offsets = diagonal;
  for (BroadcastOperand* operand : {&attention.attn_mask, &attention.attn_bias}) operand->dims[2] = 1;
  return attention;
}

// Products beyond those that plan() checks.
Status check_memory_sizes(const LayerState& s) {
  const size_t element = 8;
  const struct {
    const char* name;
    int64_t rows, columns;
  } matrices[] = {{"query", s.desc.seqlen_q, s.desc.query_size},
                  {"key", s.desc.seqlen_k, s.desc.key_size},
                  {"value", s.desc.seqlen_k, s.desc.value_size},
                  {"out", s.desc.seqlen_q, s.out_size}};
  for (const auto& m : matrices) {
    MemoryMap map;
    map.take({s.desc.batch, s.desc.beam, m.rows, m.columns}, element);
    if (map.fits()) continue;
    return {StatusCode::kInvalidArgument,
            sentence(m.name, " is too large: batch ", s.desc.batch, " * beam ", s.desc.beam, " * time steps ", m.rows,
                     " * size ", m.columns, " elements pass the address space")};
  }
  return {};
}

Status make_plans(LayerState& s, const PlanOptions& options) {
  s.asked = sized_attention(s);
  if (Status status = check_desc(s.asked); !status.ok()) return status;
  AttentionDesc inference = s.asked;
  inference.dropout_p = 0;
  const std::pair<std::optional<Plan>*, AttentionDesc> plans[] = {
      {&s.train, s.asked}, {&s.infer, inference}, {&s.step, one_step(inference)}};
  for (const auto& [to, desc] : plans) {
    Result<Plan> made = plan(desc, options);
    if (!made.ok()) return made.status();
    *to = *made;
  }
  s.run = options.where.executor != nullptr ? *options.where.executor : default_executor();
  s.linear = linear::find_kernel(s.infer->kernel_name());
  if (s.linear != nullptr) return {};
  return {StatusCode::kInternal, sentence("kernel ", s.infer->kernel_name(), " has no matrix products")};
}

bool lay_out_packed_weights(LayerState& s) {
  MatrixSize sizes[kOutMatrix + 1];
  for (int i = 0; i <= kOutMatrix; ++i) {
    const WeightLayout& layout = s.weights[i];
    if (layout.present) sizes[i] = {layout.dims[0], layout.dims[1]};
  }
  return lay_out_packed(*s.linear, s.desc.dtype, sizes, &s.packed);
}

// The lists, each with its own places in the workspace; those of one pass may be given the same one.
bool lay_out_forward(LayerState& s) {
  const struct {
    LayerMode mode;
    StepList* list;
  } all[] = {{LayerMode::kTraining, &s.train_steps},
             {LayerMode::kInference, &s.infer_steps},
             {LayerMode::kStep, &s.decode_steps}};
  for (const auto& [mode, list] : all) {
    LayerPlaces places = layer_places(s);
    Memory workspace(Place::Room::kWorkspace), reserve(Place::Room::kReserve);
    reserve.map.take_bytes(sizeof(ReserveHeader));
    take_activations(s, mode, mode == LayerMode::kTraining ? reserve : workspace, &places);
    if (!reserve.map.fits()) return false;
    expect_inputs(s, mode, list);
    expect_residual(s, mode, list);
    expect_weights(s, WeightUse::kForward, list);
    expect_options(s, list);
    expect_outputs(s, mode, list);
    if (mode != LayerMode::kTraining) expect_caches(s, mode, list);
    emit_forward(s, places, mode, workspace, &list->steps);
    if (!finish(s.machine(), workspace, list, mode == LayerMode::kStep)) return false;
  }
  share_workspace({&s.train_steps, &s.infer_steps, &s.decode_steps});
  return true;
}

bool lay_out_backward(LayerState& s) {
  LayerPlaces places = layer_places(s);
  Memory reserve(Place::Room::kReserve);
  reserve.map.take_bytes(sizeof(ReserveHeader));
  take_activations(s, LayerMode::kTraining, reserve, &places);
  take_head_gradients(s, reserve, &places);
  if (!reserve.map.fits()) return false;
  s.reserve_bytes = reserve.map.bytes();
  for (StepList* list : {&s.backward_data, &s.backward_weights}) {
    expect_inputs(s, LayerMode::kTraining, list);
    expect_residual(s, LayerMode::kTraining, list);
    expect_weights(s, WeightUse::kBackward, list);
    expect_options(s, list);
    expect_out(s, LayerMode::kTraining, kArgGradOut, "grad_out", Role::kInput, list);
    Memory workspace(Place::Room::kWorkspace);
    const Place copies = take_row_copies(s, workspace);
    if (list == &s.backward_data) {
      expect_input_gradients(s, list);
      emit_backward_data(s, places, copies, workspace, &list->steps);
    } else {
      expect_weights(s, WeightUse::kGradients, list);
      emit_backward_weights(s, places, copies, &list->steps);
    }
    if (!finish(s.machine(), workspace, list)) return false;
  }
  share_workspace({&s.backward_data, &s.backward_weights});
  return true;
}

Status check_step(const LayerState& s, const Call& call) {
  const auto given = [&](int argument) { return call.tensors[argument].given(); };
  if (call.reserve != nullptr && call.step == -1) {
    for (const int cache : {kArgKeyCache, kArgValueCache}) {
      if (!given(cache)) continue;
      const char* name = cache == kArgKeyCache ? "key_cache" : "value_cache";
      return invalid(sentence(name, " and a reserve are given: caches are for inference"));
    }
  }
  if (call.step == -1) return {};
  const LayerDesc& desc = s.desc;
  if (call.step < -1) return invalid(sentence("step is ", call.step, ", must be -1 (all steps) or at least 0"));
  if (call.step >= desc.seqlen_q) {
    return invalid(sentence("step is ", call.step, ", must be less than seqlen_q ", desc.seqlen_q));
  }
  if (given(kArgKey) && call.step >= desc.seqlen_k) {
    return invalid(sentence("step is ", call.step, ", must be less than seqlen_k ", desc.seqlen_k,
                            " where key and value join the cache"));
  }
  if (call.reserve != nullptr) return invalid("step and a reserve are given: a step is inference");
  if (given(kArgKey) != given(kArgValue)) {
    return invalid(sentence(given(kArgKey) ? "value" : "key", " is missing: a step takes key and value, or neither"));
  }
  for (const int cache : {kArgKeyCache, kArgValueCache}) {
    const char* name = cache == kArgKeyCache ? "key_cache" : "value_cache";
    if (!given(cache)) return invalid(sentence(name, " is missing: a step needs it"));
  }
  return {};
}

// Checks a backward call and walks its list.
Status run_backward(const LayerState& s, const StepList& list, uint64_t stage, const LayerBackwardArgs& args) {
  Call call = call_of(s.desc, args.forward);
  set_gradients(args, &call);
  if (call.step != -1) return invalid(sentence("step is ", call.step, ", backward takes all steps: -1"));
  if (call.tensors[kArgKeyCache].given() || call.tensors[kArgValueCache].given()) {
    return invalid("key_cache or value_cache is given to backward: caches are for inference");
  }
  Status status = check_call(list, s.packed, {s.reserve_bytes, s.fingerprint, stage, "layer"}, call);
  if (status.ok()) status = check_lengths(s, call);
  return status.ok() ? run(s.machine(), list, call) : status;
}

}  // namespace

Result<std::shared_ptr<const LayerState>> make_layer_state(const LayerDesc& desc, const PlanOptions& options) {
  if (Status status = check_layer_desc(desc); !status.ok()) return status;
  auto state = std::make_shared<LayerState>();
  LayerState& s = *state;
  s.desc = desc;
  set_sizes(s);
  MemoryMap heads, weights;
  heads.take({desc.num_heads, s.projections[kValue].dim}, 8);
  if (heads.fits()) s.heads_size = desc.num_heads * s.projections[kValue].dim;
  s.out_size = s.out_projected() ? desc.out_proj_size : s.heads_size;
  if (Status status = check_memory_sizes(s); !status.ok()) return status;
  if (Status status = make_plans(s, options); !status.ok()) return status;
  lay_out_weights(s, weights);
  s.weights_bytes = weights.bytes();
  if (!weights.fits() || !lay_out_packed_weights(s) || !lay_out_backward(s) || !lay_out_forward(s)) {
    return Status(StatusCode::kInvalidArgument, "the layer is too large: its memory passes the address space");
  }
  expect_weights(s, WeightUse::kMatrices, &s.pack);
  s.fingerprint = fingerprint_of(desc);
  return std::shared_ptr<const LayerState>(std::move(state));
}

Result<Layer> layer(const LayerDesc& desc, const PlanOptions& options) try {
  Result<std::shared_ptr<const LayerState>> state = make_layer_state(desc, options);
  if (!state.ok()) return state.status();
  Layer made;
  made.state_ = std::move(*state);
  return made;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

const LayerDesc& Layer::desc() const { return state_->desc; }
const char* Layer::kernel_name() const { return state_->infer->kernel_name(); }
int64_t Layer::out_size() const { return state_->out_size; }
size_t Layer::weights_bytes() const { return state_->weights_bytes; }
size_t Layer::packed_weights_bytes() const { return state_->packed.bytes; }
size_t Layer::workspace_bytes() const { return state_->train_steps.workspace_bytes; }
size_t Layer::backward_workspace_bytes() const { return state_->backward_data.workspace_bytes; }
size_t Layer::reserve_bytes() const { return state_->reserve_bytes; }
LayerWeights Layer::weights_in(void* buffer) const { return tensors_of(*state_, buffer); }

WeightLayout Layer::weight_layout(WeightKind kind) const {
  const auto index = static_cast<int32_t>(kind);
  return index >= 0 && index < kNumWeightKinds ? state_->weights[index] : WeightLayout();
}

Status Layer::pack_weights(const LayerWeights& weights, void* packed, size_t bytes) const try {
  const LayerState& s = *state_;
  Call call;
  set_weights(weights, kArgWeights, &call);
  if (Status status = check_pack(s.pack, s.packed, packed, bytes, call); !status.ok()) return status;
  linear::Matrix matrices[kOutMatrix + 1];
  for (int i = 0; i <= kOutMatrix; ++i) matrices[i] = weight_matrix(weights[static_cast<WeightKind>(i)]);
  write_packed(*s.linear, s.packed, matrices, packed, s.run);
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status Layer::forward(const LayerForwardArgs& args) const try {
  const LayerState& s = *state_;
  const Call call = call_of(s.desc, args);
  const StepList& list = call.step >= 0 ? s.decode_steps : call.reserve != nullptr ? s.train_steps : s.infer_steps;
  Status status = check_step(s, call);
  if (status.ok()) status = check_call(list, s.packed, {s.reserve_bytes}, call);
  if (status.ok()) status = check_lengths(s, call);
  if (!status.ok()) return status;
  if (call.reserve != nullptr) begin_reserve(call.reserve, s.fingerprint, call.dropouts);
  return run(s.machine(), list, call);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status Layer::backward_data(const LayerBackwardArgs& args) const try {
  const Status status = run_backward(*state_, state_->backward_data, ReserveHeader::kForwardDone, args);
  if (status.ok()) set_stage(args.forward.reserve, ReserveHeader::kBackwardDataDone);
  return status;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status Layer::backward_weights(const LayerBackwardArgs& args) const try {
  bool any = false;
  for (int kind = 0; kind < kNumWeightKinds; ++kind) {
    any = any || args.grad_weights[static_cast<WeightKind>(kind)].given();
  }
  if (!any) return invalid("no gradient is asked for: give one of grad_weights");
  return run_backward(*state_, state_->backward_weights, ReserveHeader::kBackwardDataDone, args);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
