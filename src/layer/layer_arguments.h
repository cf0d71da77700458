// The arguments of a layer and of an attention block by number.
#pragma once

#include "layer/layer_steps.h"
#include "layer/places.h"
#include "polyhead/block.h"

namespace polyhead {

enum LayerArgument : int {
  kArgQuery,
  kArgKey,
  kArgValue,
  kArgResidual,
  kArgWeights,  // the first of all, in the order of WeightKind
  kArgGamma = kArgWeights + kNumWeightKinds,
  kArgBeta,
  kArgMask,
  kArgBias,
  kArgSlopes,
  kArgLengthsQ,
  kArgLengthsK,
  kArgOffsets,
  kArgWindowLo,
  kArgWindowHi,
  kArgOut,
  kArgProbabilities,
  kArgKeyCache,
  kArgValueCache,
  kArgGradOut,
  kArgGradQuery,
  kArgGradKey,
  kArgGradValue,
  kArgGradBias,
  kArgGradSlopes,
  kArgGradWeights,  // likewise
  kArgGradGamma = kArgGradWeights + kNumWeightKinds,
  kArgGradBeta,
  kNumLayerArguments,
};
static_assert(kNumLayerArguments <= kMaxArguments);

constexpr ArgumentSet only(int argument) { return ArgumentSet{1} << argument; }

// The call with these tensors, with a beam dim everywhere: [batch, beam, time, vector]; lengths and offsets [batch, beam].
Call call_of(const LayerDesc& desc, const LayerForwardArgs& args);
void set_weights(const LayerWeights& weights, int first_argument, Call* call);

// The gradients of a layer or a block, and what comes in.
template <class Args>
void set_gradients(const Args& args, Call* call) {
  call->tensors[kArgGradOut] = with_beam(args.grad_out, 4);
  call->tensors[kArgGradQuery] = with_beam(args.grad_query, 4);
  call->tensors[kArgGradKey] = with_beam(args.grad_key, 4);
  call->tensors[kArgGradValue] = with_beam(args.grad_value, 4);
  call->tensors[kArgGradBias] = args.grad_attn_bias;
  call->tensors[kArgGradSlopes] = args.grad_alibi_slopes;
  set_weights(args.grad_weights, kArgGradWeights, call);
  call->accumulate = args.accumulate;
}

// What calls are given, in the order in which it is checked.
enum class WeightUse { kForward, kBackward, kMatrices, kGradients };
void expect_inputs(const LayerState& s, LayerMode mode, StepList* list);
void expect_out(const LayerState& s, LayerMode mode, int argument, const char* name, Role role, StepList* list);
void expect_residual(const LayerState& s, LayerMode mode, StepList* list);
void expect_weights(const LayerState& s, WeightUse use, StepList* list);
void expect_options(const LayerState& s, StepList* list);
void expect_outputs(const LayerState& s, LayerMode mode, StepList* list);
void expect_caches(const LayerState& s, LayerMode mode, StepList* list);
void expect_input_gradients(const LayerState& s, StepList* list);

// Lengths are data: they are looked at in every call.
Status check_lengths(const LayerState& s, const Call& call);

}  // namespace polyhead
