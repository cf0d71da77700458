#include "layer/arguments.h"

#include <algorithm>
#include <utility>

#include "cache/append.h"
#include "contract/attention_operands.h"
#include "layer/call_checks.h"

namespace polyhead {
namespace {

constexpr const char* kInputNames[] = {"query", "key", "value"};
constexpr const char* kGradInputNames[] = {"grad_query", "grad_key", "grad_value"};
constexpr const char* kInputSizes[] = {"query_size", "key_size", "value_size"};

// Lengths and offsets [batch] of all beams: the same for each.
Tensor of_all_beams(const Tensor& t, int64_t beams) {
  if (t.ndim != 1) return t;
  Tensor all = t;
  all.ndim = 2;
  all.dims[1] = beams;
  all.strides[1] = 0;
  return all;
}

Dim time_steps(const LayerState& s, Pass pass, int i) {
  if (pass == Pass::kOneStep) return {"one step,", 1};
  const char* const of_keys = s.desc.seqlen_new > 0 ? "seqlen_new" : s.desc.cache ? "seqlen_q" : "seqlen_k";
  return {i == kQuery ? "seqlen_q" : of_keys, s.projections[i].steps};
}

// Query, key or value, or its gradient.
Expected input(const LayerState& s, Pass pass, int i, int argument, const char* name) {
  const Projection& p = s.projections[i];
  const Dim beam{i == kQuery ? "beam" : "beam_kv", p.beams};
  return expect(argument, name,
                {s.dtype, {{"batch", s.desc.batch}, beam, time_steps(s, pass, i), {kInputSizes[i], p.size}}});
}

void expect_out(const LayerState& s, Pass pass, int argument, const char* name, Role role, StepList* list) {
  const LayerDesc& d = s.desc;
  Expected& e = list->expected.emplace_back(
      expect(argument, name,
             {d.dtype, {{"batch", d.batch}, {"beam", d.beam}, time_steps(s, pass, kQuery), {"out size", s.out_size}}}));
  e.role = role;
}

void expect_residual(const LayerState& s, Pass pass, StepList* list) {
  if (s.desc.residual) return expect_out(s, pass, kArgResidual, "residual", Role::kInput, list);
  list->expected.push_back(refuse(kArgResidual, "residual"));
}

// As attention has them, but that lengths and offsets have beams.
void expect_options(const LayerState& s, StepList* list) {
  const LayerDesc& d = s.desc;
  constexpr int64_t kNoBeams = 0;
  const struct {
    int argument;
    Tensor ForwardArgs::*tensor;
    const char* beam_name;
    int64_t beams;
  } options[] = {{kArgMask, &ForwardArgs::attn_mask, "", kNoBeams},
                 {kArgBias, &ForwardArgs::attn_bias, "", kNoBeams},
                 {kArgSlopes, &ForwardArgs::alibi_slopes, "", kNoBeams},
                 {kArgSinks, &ForwardArgs::sink_logits, "", kNoBeams},
                 {kArgLengthsQ, &ForwardArgs::seqlens_q, "beam", d.beam},
                 {kArgLengthsK, &ForwardArgs::seqlens_k, "beam_kv", d.beam_kv},
                 {kArgOffsets, &ForwardArgs::query_offsets, "beam", d.beam},
                 {kArgWindowLo, &ForwardArgs::window_lo, "", kNoBeams},
                 {kArgWindowHi, &ForwardArgs::window_hi, "", kNoBeams}};
  for (const auto& option : options) {
    const AttentionOperand& operand = attention_operand(option.tensor);
    OperandShape shape = operand.shape(s.asked);
    if (shape.ndim > 0 && option.beams != kNoBeams) shape.dims[shape.ndim++] = {option.beam_name, option.beams};
    list->expected.push_back(expect(option.argument, operand.name, shape));
  }
}

// What the program captures, or the gradients of that.
void expect_captures(const LayerState& s, bool gradients, StepList* list) {
  for (const PlannedOperand& operand : planned_operands(s.asked)) {
    if (operand.row.in_forward != nullptr || operand.row.in_backward != nullptr) continue;
    if (operand.row.grad_capture != gradients) continue;
    const int first = gradients ? kArgGradCaptures : kArgCaptures;
    Expected& e = list->expected.emplace_back(
        expect(first + static_cast<int>(operand.row.capture), operand.row.name, operand.shape));
    if (!gradients) continue;
    e.role = Role::kOutput;
    e.refusal = "that capture holds no floats";
    if (e.kind == Expected::Kind::kRequired) e.kind = Expected::Kind::kOptional;
  }
}

void expect_outputs(const LayerState& s, Pass pass, StepList* list) {
  const LayerDesc& d = s.desc;
  expect_out(s, pass, kArgOut, "out", Role::kOutput, list);
  const Dim batch{"batch", d.batch}, beam{"beam", d.beam}, heads{"num_heads", d.num_heads};
  const Dim steps = time_steps(s, pass, kQuery), keys{"seqlen_k", d.seqlen_k};
  Expected e = refuse(kArgProbabilities, "attn_weights");
  if (s.asked.return_weights == ReturnWeights::kPerHead) {
    e = expect(kArgProbabilities, e.name, {d.dtype, {batch, beam, heads, steps, keys}});
  } else if (s.asked.return_weights == ReturnWeights::kMean) {
    e = expect(kArgProbabilities, e.name, {d.dtype, {batch, beam, steps, keys}});
  }
  e.role = Role::kOutput;
  list->expected.push_back(e);
}

// What a call on a cache is given, or refused.
void expect_cache(const LayerState& s, StepList* list) {
  const KvCacheDesc none, &cache = s.desc.cache ? *s.desc.cache : none;
  const Dim batch{"batch", s.desc.batch}, pairs{"rotary_dim / 2", cache.rotary_dim / 2};
  const auto add = [&](int argument, const char* name, const OperandShape& shape, const char* refusal) -> Expected& {
    Expected& e = list->expected.emplace_back(s.desc.cache ? expect(argument, name, shape) : refuse(argument, name));
    e.refusal = s.desc.cache ? refusal : "the layer has no cache";
    return e;
  };
  const auto numbers = [&](bool asked, const Dim& steps) {
    OperandShape shape(DType::kInt64, {batch, steps});
    shape.takes = OperandShape::Takes::kInt32OrInt64;
    return asked ? shape : OperandShape();
  };
  add(kArgPageTable, "page_table", attention_operand(&ForwardArgs::page_table).shape(s.asked), "");
  Expected& slots = add(kArgSlots, "slots", numbers(true, time_steps(s, Pass::kInference, kKey)), "");
  if (s.desc.cache) slots.kind = Expected::Kind::kOptional;
  const bool turns = cache.rotary_dim > 0;
  add(kArgPositions, "positions", numbers(turns, time_steps(s, Pass::kInference, kQuery)), "rotary_dim is 0");
  const OperandShape table(DType::kFloat32, {{"positions", 0}, pairs});
  for (const auto& [argument, name] : {std::pair{kArgCos, "cos"}, std::pair{kArgSin, "sin"}}) {
    add(argument, name, turns ? table : OperandShape(), "rotary_dim is 0").rows_of = kArgCos;
  }
  int argument = kArgPoolKey;
  for (const PoolOperand& each : pool_operands(cache)) {
    add(argument++, each.name, each.shape, kNoScales).role = Role::kGradient;  // written; any strides
  }
}

void expect_caches(const LayerState& s, Pass pass, StepList* list) {
  for (const int i : {kKey, kValue}) {
    const Projection& p = s.projections[i];
    const OperandShape shape(s.desc.dtype, {{"batch", s.desc.batch},
                                            {"beam_kv", p.beams},
                                            {"seqlen_k", p.steps},
                                            {"kept heads", p.on ? p.heads : 1},
                                            {"dim", p.dim}});
    Expected& e = list->expected.emplace_back(
        expect(i == kKey ? kArgKeyCache : kArgValueCache, i == kKey ? "key_cache" : "value_cache", shape));
    e.role = Role::kOutput;
    e.kind = pass == Pass::kInference ? Expected::Kind::kOptional : Expected::Kind::kRequired;
    if (!s.desc.cache) continue;
    e.kind = Expected::Kind::kRefused;
    e.refusal = "the pages of desc.cache hold keys and values";
  }
}

void expect_input_gradients(const LayerState& s, StepList* list) {
  for (int i = kQuery; i <= kValue; ++i) {
    Expected& e = list->expected.emplace_back(input(s, Pass::kBackward, i, kArgGradQuery + i, kGradInputNames[i]));
    e.role = Role::kOutput;
    e.kind = Expected::Kind::kOptional;
    e.may_be_shared = true;
  }
  constexpr struct {
    int argument, gradient;
    const char* name;
  } kOfOptions[] = {{kArgBias, kArgGradBias, "grad_attn_bias"},
                    {kArgSlopes, kArgGradSlopes, "grad_alibi_slopes"},
                    {kArgSinks, kArgGradSinks, "grad_sink_logits"}};
  for (const auto& of : kOfOptions) {  // like the options
    Expected e = *std::find_if(list->expected.begin(), list->expected.end(),
                               [&](const Expected& option) { return option.argument == of.argument; });
    e.argument = of.gradient;
    e.name = of.name;
    e.role = Role::kOutput;
    if (e.kind == Expected::Kind::kRequired) e.kind = Expected::Kind::kOptional;
    list->expected.push_back(e);
  }
  expect_captures(s, true, list);
}

}  // namespace

Call call_of(const LayerDesc& desc, const LayerForwardArgs& args) {
  Call call;
  Tensor* const to = call.tensors;
  to[kArgQuery] = with_beam(args.query, 4);
  to[kArgKey] = with_beam(args.key, 4);
  to[kArgValue] = with_beam(args.value, 4);
  to[kArgResidual] = with_beam(args.residual, 4);
  set_weights(args.weights, kArgWeights, &call);
  to[kArgMask] = args.attn_mask;
  to[kArgBias] = args.attn_bias;
  to[kArgSlopes] = args.alibi_slopes;
  to[kArgSinks] = args.sink_logits;
  to[kArgLengthsQ] = of_all_beams(args.seqlens_q, desc.beam);
  to[kArgLengthsK] = of_all_beams(args.seqlens_k, desc.beam_kv);
  to[kArgOffsets] = of_all_beams(args.query_offsets, desc.beam);
  to[kArgWindowLo] = args.window_lo;
  to[kArgWindowHi] = args.window_hi;
  call.num_captures = set_captures(args.captures, kArgCaptures, &call);
  to[kArgOut] = with_beam(args.out, 4);
  const bool per_head = desc.attention.return_weights == ReturnWeights::kPerHead;
  to[kArgProbabilities] = with_beam(args.attn_weights, per_head ? 5 : 4);
  to[kArgKeyCache] = with_beam(args.key_cache, 5);
  to[kArgValueCache] = with_beam(args.value_cache, 5);
  set_memory(args, &call);
  const LayerCacheArgs& cache = args.cache;
  const std::pair<int, const Tensor*> of_cache[] = {{kArgPoolKey, &cache.pool.key},
                                                    {kArgPoolValue, &cache.pool.value},
                                                    {kArgPoolKeyScales, &cache.pool.key_scales},
                                                    {kArgPoolValueScales, &cache.pool.value_scales},
                                                    {kArgPageTable, &cache.page_table},
                                                    {kArgSlots, &cache.slots},
                                                    {kArgPositions, &cache.positions},
                                                    {kArgCos, &cache.cos},
                                                    {kArgSin, &cache.sin}};
  for (const auto& [argument, tensor] : of_cache) {  // most calls have none
    if (tensor->given()) to[argument] = *tensor;
  }
  call.step = args.step;
  call.dropouts = {{{"dropout", desc.attention.dropout_p, args.dropout_seed, args.dropout_offset, desc.beam},
                    {"output_dropout", desc.output_dropout_p, args.output_dropout_seed, args.output_dropout_offset}}};
  return call;
}

size_t set_captures(std::span<const Tensor> captures, int first_argument, Call* call) {
  const size_t most = std::min<size_t>(captures.size(), Program::kMostCaptures);
  std::copy_n(captures.begin(), most, call->tensors + first_argument);
  return captures.size();
}

void set_weights(const LayerWeights& weights, int first_argument, Call* call) {
  for (int kind = 0; kind < kNumWeightKinds; ++kind) {
    call->tensors[first_argument + kind] = weights[static_cast<WeightKind>(kind)];
  }
}

void set_norm(const NormWeights& weights, int first_argument, Call* call) {
  call->tensors[first_argument] = weights.gamma;
  call->tensors[first_argument + 1] = weights.beta;
}

void expect_arguments(const LayerState& s, Pass pass, const NormBlock* block, StepList* list) {
  const auto norm = [&](Role role, int first) {
    if (block != nullptr) expect_norm(block->norm, role, first, block->size, s.dtype, list);
  };
  for (int i = kQuery; i <= kValue; ++i) {
    Expected& e = list->expected.emplace_back(input(s, pass, i, kArgQuery + i, kInputNames[i]));
    const bool may_lack = block != nullptr || pass == Pass::kOneStep || s.desc.cache;
    if (i != kQuery && may_lack) e.kind = Expected::Kind::kOptional;
  }
  if (block == nullptr) expect_residual(s, pass, list);
  norm(Role::kInput, kArgGamma);
  expect_parameters(s, is_backward(pass) ? ParameterUse::kBackward : ParameterUse::kForward, list);
  expect_options(s, list);
  expect_captures(s, false, list);
  expect_cache(s, list);
  if (!is_backward(pass)) {
    expect_outputs(s, pass, list);
    if (block == nullptr && pass != Pass::kTraining) expect_caches(s, pass, list);
    return;
  }
  expect_out(s, pass, kArgGradOut, "grad_out", Role::kInput, list);
  if (pass == Pass::kBackward) expect_input_gradients(s, list);
  if (block != nullptr || pass == Pass::kBackwardWeights) expect_parameters(s, ParameterUse::kGradients, list);
  norm(Role::kOutput, kArgGradGamma);
}

}  // namespace polyhead
