//   pre-norm:   n = norm(x)   y = x + layer(n)          z = x + layer(x)   y = norm(z)   :post-norm
// Saved for backward: z, and the norm's statistics, beside what the layer saves; n is computed once more.
#include <new>
#include <optional>
#include <utility>

#include "core/sentence.h"
#include "layer/call_checks.h"
#include "layer/fingerprint.h"
#include "layer/layer_arguments.h"

namespace polyhead {

struct AttentionBlockState {
  AttentionBlockDesc desc;
  std::optional<Layer> layer;
  std::shared_ptr<const LayerState> parts;  // the layer's
  uint64_t fingerprint = 0;
  int64_t size = 0;  // of what is normed
  bool pre = false, post = false;

  size_t reserve_bytes = 0;
  StepList train_steps, infer_steps, backward_steps;
};

namespace {

// What a block saves for backward, beside the layer's activations.
struct Saved {
  LayerPlaces layer;
  Place z, mean, rstd;
};

// Rows of what is normed: [batch, beam, seqlen_q, size].
Place take_rows(const AttentionBlockState& s, Memory& memory) {
  const LayerDesc& d = s.desc.layer;
  return memory.take(d.dtype, {d.batch, d.beam, d.seqlen_q, s.size});
}

Saved take_saved(const AttentionBlockState& s, const LayerPlaces& layer, Memory& reserve) {
  const LayerDesc& d = s.desc.layer;
  const DType sums = d.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  Saved saved;
  reserve.map.take_bytes(sizeof(ReserveHeader));
  saved.layer = layer;
  take_activations(*s.parts, LayerMode::kTraining, reserve, &saved.layer);
  if (s.post) saved.z = take_rows(s, reserve);
  if (s.pre || s.post) {
    saved.mean = reserve.take(sums, {d.batch * d.beam * d.seqlen_q});
    saved.rstd = reserve.take(sums, {d.batch * d.beam * d.seqlen_q});
  }
  return saved;
}

// `n`: what stands for x before the layer.
LayerPlaces places_around(const AttentionBlockState& s, const Place& n) {
  LayerPlaces places;
  places.inputs[kQuery] = n;
  places.inputs[kKey] = n.unless_given(kArgKey, kArgKey, Place::View::kWhole);
  places.inputs[kValue] = n.unless_given(kArgKey, kArgValue, Place::View::kWhole);
  if (s.desc.layer.residual) places.residual = argument(kArgQuery);
  return places;
}

void expect_block_inputs(const AttentionBlockState& s, WeightUse weights, StepList* list) {
  expect_inputs(*s.parts, LayerMode::kTraining, list);
  for (Expected& e : list->expected) {
    if (e.argument != kArgQuery) e.kind = Expected::Kind::kOptional;
  }
  expect_norm(s.desc.norm, Role::kInput, kArgGamma, s.size, s.desc.layer.dtype, list);
  expect_weights(*s.parts, weights, list);
  expect_options(*s.parts, list);
}

bool lay_out_forward(AttentionBlockState& s, LayerMode mode, StepList* list) {
  const bool training = mode == LayerMode::kTraining;
  Memory workspace(Place::Room::kWorkspace), reserve(Place::Room::kReserve);
  const Place x = argument(kArgQuery), y = argument(kArgOut);
  const Place n = s.pre ? take_rows(s, workspace) : x;
  Saved saved;
  LayerPlaces places = places_around(s, n);
  const Place z = s.post && !training ? take_rows(s, workspace) : Place();
  places.out = s.post ? z : y;
  if (training) {
    saved = take_saved(s, places, reserve);
    places = saved.layer;
    if (s.post) places.out = saved.z;
    if (!reserve.map.fits()) return false;
  } else {
    take_activations(*s.parts, mode, workspace, &places);
  }
  expect_block_inputs(s, WeightUse::kForward, list);
  expect_outputs(*s.parts, mode, list);
  const Place gamma = argument(kArgGamma), beta = argument(kArgBeta);
  if (s.pre) list->steps.emplace_back(NormStep{s.desc.norm, x, n, gamma, beta, saved.mean, saved.rstd});
  emit_forward(*s.parts, places, mode, workspace, &list->steps);
  if (s.post) list->steps.emplace_back(NormStep{s.desc.norm, places.out, y, gamma, beta, saved.mean, saved.rstd});
  return finish(s.parts->machine(), workspace, list);
}

bool lay_out_backward(AttentionBlockState& s, StepList* list) {
  Memory workspace(Place::Room::kWorkspace), reserve(Place::Room::kReserve);
  const Place x = argument(kArgQuery), grad_x = argument(kArgGradQuery), grad_y = argument(kArgGradOut);
  const Place n = s.pre ? take_rows(s, workspace) : x;
  const Place rows = s.pre || s.post ? take_rows(s, workspace) : Place();  // the gradient of n, or z
  const Place gamma = argument(kArgGamma);
  Saved saved = take_saved(s, places_around(s, n), reserve);
  s.reserve_bytes = reserve.map.bytes();
  if (!reserve.map.fits()) return false;
  LayerPlaces& places = saved.layer;
  take_head_gradients(*s.parts, workspace, &places);
  places.grad_out = s.post ? rows : grad_y;
  places.grads[kQuery] = s.pre ? rows.only_for(only(kArgGradQuery) | only(kArgGradGamma) | only(kArgGradBeta)) : grad_x;
  places.grads[kKey] = places.grads[kQuery].unless_given(kArgKey, kArgGradKey, Place::View::kWhole);
  places.grads[kValue] = places.grads[kQuery].unless_given(kArgKey, kArgGradValue, Place::View::kWhole);

  expect_block_inputs(s, WeightUse::kBackward, list);
  expect_out(*s.parts, LayerMode::kTraining, kArgGradOut, "grad_out", Role::kInput, list);
  expect_input_gradients(*s.parts, list);
  expect_weights(*s.parts, WeightUse::kGradients, list);
  expect_norm(s.desc.norm, Role::kOutput, kArgGradGamma, s.size, s.desc.layer.dtype, list);

  NormBackwardStep norm = {
      s.desc.norm, x, gamma, saved.mean, saved.rstd, rows, {}, grad_x, argument(kArgGradGamma), argument(kArgGradBeta)};
  if (s.post) {
    norm.x = saved.z;
    norm.grad_y = grad_y;
    norm.grad_x = rows;
    list->steps.emplace_back(norm);
  }
  if (s.pre) list->steps.emplace_back(NormStep{s.desc.norm, x, n, gamma, argument(kArgBeta), {}, {}});
  const Place copies = take_row_copies(*s.parts, workspace);
  emit_backward_data(*s.parts, places, copies, workspace, &list->steps);
  emit_backward_weights(*s.parts, places, copies, &list->steps);
  if (s.pre) {
    if (s.desc.layer.residual) norm.residual = grad_y;
    list->steps.emplace_back(norm);
  } else if (s.desc.layer.residual) {
    EpiloguePlaces add;
    add.residual = places.grad_out;
    list->steps.emplace_back(PointwiseStep{grad_x, grad_x, add});
  }
  return finish(s.parts->machine(), workspace, list);
}

// What the lists do not know.
Status check_block_args(const AttentionBlockState& s, const Call& call) {
  const auto given = [&](int argument) { return call.tensors[argument].given(); };
  if (call.step != -1 || given(kArgKeyCache) || given(kArgValueCache)) {
    return invalid("a step or a cache is given: a block has neither");
  }
  if (given(kArgResidual)) return invalid("layer.residual is given: a block adds its query");
  if (given(kArgKey) != given(kArgValue)) {
    return invalid(sentence("layer.", given(kArgKey) ? "value" : "key",
                            " is missing: give key and value, or neither for self-attention"));
  }
  if (given(kArgKey)) return {};
  const LayerDesc& d = s.desc.layer;
  const bool as_query =
      d.key_size == d.query_size && d.value_size == d.query_size && d.seqlen_k == d.seqlen_q && d.beam_kv == d.beam;
  if (!as_query) {
    return invalid("key and value are not given, but the layer's differ from query in size, length or beam");
  }
  if (!given(kArgGradKey) && !given(kArgGradValue)) return {};
  return invalid("grad_key or grad_value is given: with self-attention grad_query has all");
}

Call call_of(const AttentionBlockState& s, const AttentionBlockForwardArgs& args) {
  Call call = polyhead::call_of(s.desc.layer, args.layer);
  call.tensors[kArgGamma] = args.norm.gamma;
  call.tensors[kArgBeta] = args.norm.beta;
  return call;
}

Status check(const AttentionBlockState& s, const StepList& list, uint64_t stage, const Call& call) {
  const LayerState& parts = *s.parts;
  Status status = check_block_args(s, call);
  if (status.ok()) {
    status = check_call(list, parts.packed, {s.reserve_bytes, s.fingerprint, stage, "block"}, call);
  }
  return status.ok() ? check_lengths(parts, call) : status;
}

}  // namespace

const AttentionBlockDesc& AttentionBlock::desc() const { return state_->desc; }
const Layer& AttentionBlock::layer() const { return *state_->layer; }
size_t AttentionBlock::workspace_bytes() const { return state_->train_steps.workspace_bytes; }
size_t AttentionBlock::backward_workspace_bytes() const { return state_->backward_steps.workspace_bytes; }
size_t AttentionBlock::reserve_bytes() const { return state_->reserve_bytes; }

Result<AttentionBlock> attention_block(const AttentionBlockDesc& desc, const PlanOptions& options) try {
  if (Status status = check_norm_desc(desc.norm); !status.ok()) return status;
  Result<std::shared_ptr<const LayerState>> parts = make_layer_state(desc.layer, options);
  if (!parts.ok()) return parts.status();
  const int64_t out_size = (*parts)->out_size;
  if (desc.layer.residual && out_size != desc.layer.query_size) {
    return invalid(
        sentence("residual adds query to out: out size is ", out_size, ", must be query_size ", desc.layer.query_size));
  }
  auto state = std::make_shared<AttentionBlockState>();
  AttentionBlockState& s = *state;
  s.desc = desc;
  s.parts = *parts;
  Layer layer;
  layer.state_ = std::move(*parts);
  s.layer = std::move(layer);
  s.pre = desc.norm.kind != NormKind::kNone && desc.norm.pre;
  s.post = desc.norm.kind != NormKind::kNone && !desc.norm.pre;
  s.size = s.pre ? desc.layer.query_size : out_size;
  s.fingerprint = fingerprint_of(desc);
  if (!lay_out_backward(s, &s.backward_steps) || !lay_out_forward(s, LayerMode::kTraining, &s.train_steps) ||
      !lay_out_forward(s, LayerMode::kInference, &s.infer_steps)) {
    return invalid("the block is too large: its memory passes the address space");
  }
  share_workspace({&s.train_steps, &s.infer_steps});
  AttentionBlock made;
  made.state_ = std::move(state);
  return made;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status AttentionBlock::forward(const AttentionBlockForwardArgs& args) const try {
  const AttentionBlockState& s = *state_;
  const Call call = call_of(s, args);
  const StepList& list = call.reserve != nullptr ? s.train_steps : s.infer_steps;
  if (Status status = check(s, list, 0, call); !status.ok()) return status;
  if (call.reserve != nullptr) begin_reserve(call.reserve, s.fingerprint, call.dropouts);
  return run(s.parts->machine(), list, call);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status AttentionBlock::backward(const AttentionBlockBackwardArgs& args) const try {
  const AttentionBlockState& s = *state_;
  Call call = call_of(s, args.forward);
  set_gradients(args, &call);
  call.tensors[kArgGradGamma] = args.grad_norm.gamma;
  call.tensors[kArgGradBeta] = args.grad_norm.beta;
  if (Status status = check(s, s.backward_steps, ReserveHeader::kForwardDone, call); !status.ok()) return status;
  return run(s.parts->machine(), s.backward_steps, call);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
