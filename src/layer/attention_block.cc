// y = x + layer(norm(x)), or y = norm(x + layer(x)).
#include <iterator>
#include <new>
#include <optional>
#include <utility>

#include "core/sentence.h"
#include "layer/append_steps.h"
#include "layer/arguments.h"
#include "layer/call_checks.h"
#include "layer/fingerprint.h"
#include "layer/layer_steps.h"

namespace polyhead {

struct AttentionBlockState : NormBlock {
  AttentionBlockDesc desc;
  std::optional<Layer> layer;
  std::shared_ptr<const LayerState> parts;  // the layer's

  void expect(Pass pass, StepList* list) const override { expect_arguments(*parts, pass, this, list); }
  void emit_inner(Pass pass, const InnerPlaces& f, Memory& workspace, Memory& reserve,
                  std::vector<Step>* steps) const override;
  Status check(Pass pass, const Call& call) const override;
};

void AttentionBlockState::emit_inner(Pass pass, const InnerPlaces& f, Memory& workspace, Memory& reserve,
                                     std::vector<Step>* steps) const {
  // On a cache what has no slots is not stored.
  const ArgumentSet stored = parts->desc.cache ? only(kArgSlots) : 0;
  const auto self_or = [&](const Place& place, int argument) {
    return (stored != 0 ? place.only_for(stored) : place).unless_given(kArgKey, argument, Place::View::kWhole);
  };
  LayerPlaces places = {{f.in, self_or(f.in, kArgKey), self_or(f.in, kArgValue)},
                        f.residual,
                        f.out,
                        f.grad_out,
                        {f.grad_in, self_or(f.grad_in, kArgGradKey), self_or(f.grad_in, kArgGradValue)}};
  emit_layer(*parts, pass, places, workspace, reserve, workspace, steps);
  if (!f.grad_past.somewhere()) return;
  EpiloguePlaces add;
  add.residual = f.grad_past;
  steps->emplace_back(PointwiseStep{f.grad_in, f.grad_in, add});
}

Status AttentionBlockState::check(Pass pass, const Call& call) const {
  const auto given = [&](int argument) { return call.tensors[argument].given(); };
  if (given(kArgKeyCache) || given(kArgValueCache)) {
    return invalid("key_cache or value_cache is given: a block has neither, but desc.layer.cache");
  }
  if (given(kArgResidual)) return invalid("layer.residual is given: a block adds its query");
  if (desc.layer.cache) return check_call_on_cache(desc.layer, true, pass, call);
  if (call.step != -1) return invalid("a step is given: a block takes none, but desc.layer.cache");
  if (given(kArgKey) != given(kArgValue)) {
    return invalid(sentence("layer.", given(kArgKey) ? "value" : "key",
                            " is missing: give key and value, or neither for self-attention"));
  }
  if (given(kArgKey)) return {};
  const LayerDesc& d = desc.layer;
  const bool as_query =
      d.key_size == d.query_size && d.value_size == d.query_size && d.seqlen_k == d.seqlen_q && d.beam_kv == d.beam;
  if (!as_query) {
    return invalid("key and value are not given, but the layer's differ from query in size, length or beam");
  }
  if (!given(kArgGradKey) && !given(kArgGradValue)) return {};
  return invalid("grad_key or grad_value is given: with self-attention grad_query has all");
}

namespace {

Call call_of(const AttentionBlockDesc& desc, const AttentionBlockForwardArgs& args) {
  Call call = call_of(desc.layer, args.layer);
  set_norm(args.norm, kArgGamma, &call);
  return call;
}

}  // namespace

const AttentionBlockDesc& AttentionBlock::desc() const { return state_->desc; }
const Layer& AttentionBlock::layer() const { return *state_->layer; }
size_t AttentionBlock::workspace_bytes() const { return state_->workspace_bytes; }
size_t AttentionBlock::backward_workspace_bytes() const { return state_->backward_workspace_bytes; }
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
  s.dtype = s.parts->dtype, s.parameters = s.parts->parameters, s.num_matrices = s.parts->num_matrices;
  s.without = s.parts->without;
  s.asked = s.parts->asked, s.beams = s.parts->beams, s.linear = s.parts->linear;
  s.where = s.parts->where, s.num_threads = s.parts->num_threads;
  s.norm = desc.norm, s.residual = desc.layer.residual;
  s.batch = desc.layer.batch, s.beam = desc.layer.beam, s.seqlen = desc.layer.seqlen_q;
  s.size = s.pre() ? desc.layer.query_size : out_size;
  s.fingerprint = fingerprint_of(desc, s.asked);
  constexpr Pass kPasses[] = {Pass::kInference, Pass::kTraining, Pass::kBackward};
  const Status status = make_lists(s, {kPasses, desc.layer.cache ? 1 : std::size(kPasses)});
  if (!status.ok()) return status;
  AttentionBlock made;
  made.state_ = std::move(state);
  return made;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status AttentionBlock::forward(const AttentionBlockForwardArgs& args) const {
  return polyhead::forward(*state_, call_of(state_->desc, args));
}

Status AttentionBlock::backward(const AttentionBlockBackwardArgs& args) const {
  Call call = call_of(state_->desc, args.forward);
  set_gradients(args, &call);
  set_norm(args.grad_norm, kArgGradGamma, &call);
  return compute(*state_, Pass::kBackward, call);
}

}  // namespace polyhead
