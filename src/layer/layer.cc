// How a layer is made, and what it tells about itself.
#include <algorithm>
#include <new>
#include <utility>

#include "attention/checks.h"
#include "attention/unchecked.h"
#include "attention/words.h"
#include "contract/one_query.h"
#include "contract/where.h"
#include "core/sentence.h"
#include "core/verbose.h"
#include "layer/append_steps.h"
#include "layer/arguments.h"
#include "layer/fingerprint.h"
#include "layer/layer_steps.h"
#include "layer/words.h"

namespace polyhead {
namespace {

void set_sizes(LayerState& s) {
  const LayerDesc& d = s.desc;
  const auto dim = [](int64_t projected, int64_t size) { return projected > 0 ? projected : size; };
  const auto of_query = [&](int64_t size, int64_t projected, bool bias) {
    return Projection{size, d.beam, d.seqlen_q, d.num_heads, dim(projected, size), projected > 0, bias};
  };
  const int64_t new_keys = d.seqlen_new > 0 ? d.seqlen_new : d.seqlen_q, keys = d.cache ? new_keys : d.seqlen_k;
  const auto of_keys = [&](int64_t size, int64_t projected, bool bias) {
    return Projection{size, d.beam_kv, keys, d.num_heads_kv, dim(projected, size), projected > 0, bias};
  };
  s.projections[kQuery] = of_query(d.query_size, d.query_proj_size, d.query_bias);
  s.projections[kKey] = of_keys(d.key_size, d.key_proj_size, d.key_bias);
  s.projections[kValue] = of_keys(d.value_size, d.value_proj_size, d.value_bias);
  s.joined = d.beam == d.beam_kv && d.seqlen_q == keys;
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
  if (s.desc.cache) {
    const KvCacheDesc& cache = *s.desc.cache;
    attention.num_pages = cache.num_pages, attention.page_size = cache.page_size;
    attention.key_dtype = cache.key_dtype, attention.key_group = cache.key_group;
    attention.value_dtype = cache.value_dtype, attention.value_group = cache.value_group;
    attention.has_seqlens_k = true;
  }
  return attention;
}

// A program that asks where the query stands captures the number of the step behind all else. One that captures as many
// tensors as it may takes no single steps (check_step): then the plan is without.
void set_program_of_step(AttentionDesc& attention) {
  const Result<SharedProgram> program = from_first_query(attention.program);
  if (!program.ok()) {
    attention.captures.clear();
    attention.program = nullptr;
  } else if (*program != attention.program) {
    attention.captures.push_back({DType::kInt64, 1, {1}});
    attention.program = *program;
  }
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
  attention.has_query_offsets = diagonal || attention.program != nullptr;
  if (attention.program != nullptr) set_program_of_step(attention);
  for (BroadcastOperand* operand : {&attention.attn_mask, &attention.attn_bias}) operand->dims[2] = 1;
  return attention;
}

// Products beyond those that plan() checks. Rows of empty vectors are counted too.
Status check_memory_sizes(const LayerState& s) {
  const size_t element = 8;
  const struct {
    const char* name;
    int64_t rows, columns;
  } matrices[] = {{"query", s.desc.seqlen_q, s.desc.query_size},
                  {"key", s.projections[kKey].steps, s.desc.key_size},
                  {"value", s.projections[kValue].steps, s.desc.value_size},
                  {"out", s.desc.seqlen_q, s.out_size}};
  for (const auto& m : matrices) {
    MemoryMap map;
    map.take({s.desc.batch, s.desc.beam, m.rows, std::max<int64_t>(m.columns, 1)}, element);
    if (map.fits()) continue;
    return {StatusCode::kInvalidArgument,
            sentence(m.name, " is too large: batch ", s.desc.batch, " * beam ", s.desc.beam, " * time steps ", m.rows,
                     " * size ", m.columns, " elements pass the address space")};
  }
  return {};
}

// Those of attention's kernel. One that has none is refused where it is asked for, and has the best others beside it
// where it was only chosen.
Status choose_products(LayerState& s, const PlanOptions& options) {
  s.linear = linear::find_kernel(s.infer->kernel_name());
  if (s.linear != nullptr && s.linear->why_not(s.dtype).empty()) return {};
  const Result<const linear::Kernel*> kernel = linear::choose_kernel(s.dtype, options.kernel, *s.where.device);
  if (!kernel.ok()) return kernel.status();
  s.linear = *kernel;
  return {};
}

Status make_plans(LayerState& s, const PlanOptions& options) {
  s.asked = sized_attention(s);
  if (Status status = check_desc(s.asked); !status.ok()) return status;
  AttentionDesc inference = s.asked;
  inference.dropout_p = 0;
  std::vector<std::pair<std::optional<Plan>*, AttentionDesc>> plans = {{&s.infer, inference}};
  if (!s.desc.cache) plans.emplace_back(&s.train, s.asked);
  if (s.takes_steps()) plans.emplace_back(&s.step, one_step(inference));
  for (const auto& [to, desc] : plans) {
    Result<Plan> made = make_plan(desc, options);
    if (!made.ok()) return made.status();
    *to = *made;
  }
  return choose_products(s, options);
}

void list_parameters(LayerState& s) {
  static constexpr const char* kNames[][2] = {
      {"weights.query", "grad_weights.query"},           {"weights.key", "grad_weights.key"},
      {"weights.value", "grad_weights.value"},           {"weights.out", "grad_weights.out"},
      {"weights.query_bias", "grad_weights.query_bias"}, {"weights.key_bias", "grad_weights.key_bias"},
      {"weights.value_bias", "grad_weights.value_bias"}, {"weights.out_bias", "grad_weights.out_bias"}};
  for (int kind = 0; kind < kNumWeightKinds; ++kind) {
    const WeightLayout& layout = s.weight_layouts[kind];
    OperandShape shape;
    shape.dtype = s.dtype, shape.ndim = layout.ndim;  // 0, if there is none
    shape.dims[0] = {layout.ndim == 2 ? "in" : "size", layout.dims[0]};
    shape.dims[1] = {"out", layout.dims[1]};
    s.parameters.push_back({kNames[kind][0], kNames[kind][1], shape});
  }
  s.num_matrices = static_cast<size_t>(WeightKind::kQueryBias);
}

Status check_step(const LayerState& s, const Call& call) {
  const auto given = [&](int argument) { return call.tensors[argument].given(); };
  const LayerDesc& desc = s.desc;
  const auto each_cache = [&](bool refused, const char* why) -> Status {
    if (given(kArgKeyCache) == refused) return invalid(sentence("key_cache ", why));
    if (given(kArgValueCache) == refused) return invalid(sentence("value_cache ", why));
    return {};
  };
  if (call.step == -1 && call.reserve == nullptr) return {};
  if (call.step == -1) return each_cache(true, "and a reserve are given: caches are for inference");
  if (call.step < -1) return invalid(sentence("step is ", call.step, ", must be -1 (all steps) or at least 0"));
  if (call.step >= desc.seqlen_q) {
    return invalid(sentence("step is ", call.step, ", must be less than seqlen_q ", desc.seqlen_q));
  }
  if (given(kArgKey) && call.step >= desc.seqlen_k) {
    return invalid(sentence("step is ", call.step, ", must be less than seqlen_k ", desc.seqlen_k,
                            " where key and value join the cache"));
  }
  if (call.reserve != nullptr) return invalid("step and a reserve are given: a step is inference");
  if (s.asked.program != nullptr && s.step->desc().program == nullptr) {
    return invalid(sentence("step is ", call.step, ": a program that captures ", Program::kMostCaptures,
                            " tensors takes no single steps, one of ", Program::kMostCaptures - 1, " would"));
  }
  if (given(kArgKey) != given(kArgValue)) {
    return invalid(sentence(given(kArgKey) ? "value" : "key", " is missing: a step takes key and value, or neither"));
  }
  return each_cache(false, "is missing: a step needs it");
}

Status check_backward(Pass pass, const Call& call) {
  ArgumentSet grad_weights = 0;
  for (int kind = 0; kind < kNumWeightKinds; ++kind) grad_weights |= only(kArgGradWeights + kind);
  if (pass == Pass::kBackwardWeights && !call.any_given(grad_weights)) {
    return invalid("no gradient is asked for: give one of grad_weights");
  }
  if (call.step != -1) return invalid(sentence("step is ", call.step, ", backward takes all steps: -1"));
  if (!call.any_given(only(kArgKeyCache) | only(kArgValueCache))) return {};
  return invalid("key_cache or value_cache is given to backward: caches are for inference");
}

Call call_of(const LayerState& s, const LayerBackwardArgs& args) {
  Call call = call_of(s.desc, args.forward);
  set_gradients(args, &call);
  return call;
}

}  // namespace

void LayerState::emit(Pass pass, Memory& workspace, Memory& reserve, StepList* list) const {
  LayerPlaces places;
  for (int i = kQuery; i <= kValue; ++i) {
    places.inputs[i] = argument(kArgQuery + i);
    places.grads[i] = argument(kArgGradQuery + i);
  }
  if (desc.residual) places.residual = argument(kArgResidual);
  places.out = argument(kArgOut);
  places.grad_out = argument(kArgGradOut);
  places.caches = !desc.cache;
  expect_arguments(*this, pass, nullptr, list);
  emit_layer(*this, pass, places, workspace, reserve, reserve, &list->steps);
}

Status LayerState::check(Pass pass, const Call& call) const {
  if (desc.cache) return check_call_on_cache(desc, false, pass, call);
  return is_backward(pass) ? check_backward(pass, call) : check_step(*this, call);
}

Result<std::shared_ptr<const LayerState>> make_layer_state(const LayerDesc& desc, const PlanOptions& options) {
  if (Status status = check_layer_desc(desc); !status.ok()) return status;
  auto state = std::make_shared<LayerState>();
  LayerState& s = *state;
  s.desc = desc;
  s.name = "layer", s.without = "the layer has none";
  s.dtype = desc.dtype, s.beams = desc.beam;
  set_sizes(s);
  MemoryMap heads, weights;
  heads.take({desc.num_heads, s.projections[kValue].dim}, 8);
  if (heads.fits()) s.heads_size = desc.num_heads * s.projections[kValue].dim;
  s.out_size = s.out_projected() ? desc.out_proj_size : s.heads_size;
  if (Status status = check_memory_sizes(s); !status.ok()) return status;
  if (Status status = set_where(options.where, &s); !status.ok()) return status;
  if (Status status = make_plans(s, options); !status.ok()) return status;
  lay_out_weights(s, weights);
  s.weights_bytes = weights.bytes();
  s.fingerprint = fingerprint_of(desc, s.asked);
  list_parameters(s);
  if (!weights.fits()) return invalid("the layer is too large: its memory passes the address space");
  std::vector<Pass> passes = {Pass::kInference};
  if (!desc.cache) passes.insert(passes.end(), {Pass::kTraining, Pass::kBackward, Pass::kBackwardWeights});
  if (s.takes_steps()) passes.push_back(Pass::kOneStep);
  if (Status status = make_lists(s, passes); !status.ok()) return status;
  if (is_verbose()) {
    AttentionDesc attention = s.asked;
    attention.has_windows = false;  // the layer's own option
    attention.page_size = 0;        // the line's layer has no cache
    attention.key_dtype.reset(), attention.value_dtype.reset();
    print_line(sentence("polyhead mha ", layer_in_words(desc), options_in_words(attention), program_in_words(attention),
                        run_in_words(s.infer->kernel_name(), *planned_where(options.where))));
  }
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
size_t Layer::prepacked_weights_bytes() const { return state_->prepacked.bytes; }
size_t Layer::workspace_bytes() const { return state_->workspace_bytes; }
size_t Layer::backward_workspace_bytes() const { return state_->backward_workspace_bytes; }
size_t Layer::reserve_bytes() const { return state_->reserve_bytes; }
LayerWeights Layer::weights_in(void* buffer) const { return tensors_of(*state_, buffer); }

WeightLayout Layer::weight_layout(WeightKind kind) const {
  const auto index = static_cast<int32_t>(kind);
  return index >= 0 && index < kNumWeightKinds ? state_->weight_layouts[index] : WeightLayout();
}

Status Layer::prepack_weights(const LayerWeights& weights, void* prepacked, size_t bytes, const Where& where) const {
  Call call;
  call.where = where;
  set_weights(weights, kArgWeights, &call);
  return polyhead::prepack_weights(*state_, call, prepacked, bytes);
}

Status Layer::forward(const LayerForwardArgs& args) const {
  return polyhead::forward(*state_, call_of(state_->desc, args));
}

Status Layer::backward_data(const LayerBackwardArgs& args) const {
  return compute(*state_, Pass::kBackward, call_of(*state_, args));
}

Status Layer::backward_weights(const LayerBackwardArgs& args) const {
  return compute(*state_, Pass::kBackwardWeights, call_of(*state_, args));
}

}  // namespace polyhead
