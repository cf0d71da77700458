// The arguments of all calls by number, and those of a layer, which are an attention block's too. The feed-forward block
// has x in the place of query, and its weights in the order of its own table.
#pragma once

#include "layer/norm_block.h"
#include "layer/places.h"
#include "layer/state.h"
#include "polyhead/block.h"

namespace polyhead {

enum Argument : int {
  kArgQuery,
  kArgKey,
  kArgValue,
  kArgResidual,
  kArgWeights,  // the first of all, in the order of Module::parameters
  kArgGamma = kArgWeights + kNumWeightKinds,
  kArgBeta,
  kArgMask,
  kArgBias,
  kArgSlopes,
  kArgSinks,
  kArgLengthsQ,
  kArgLengthsK,
  kArgOffsets,
  kArgWindowLo,
  kArgWindowHi,
  kArgCaptures,  // likewise, in the order of the program
  kArgOut = kArgCaptures + Program::kMostCaptures,
  kArgProbabilities,
  kArgKeyCache,
  kArgValueCache,
  kArgSlots,
  kArgGradOut,
  kArgGradQuery,
  kArgGradKey,
  kArgGradValue,
  kArgGradBias,
  kArgGradSlopes,
  kArgGradSinks,
  kArgGradCaptures,  // likewise
  kArgGradWeights = kArgGradCaptures + Program::kMostCaptures,
  kArgGradGamma = kArgGradWeights + kNumWeightKinds,
  kArgGradBeta,
  kNumInSets,  // of those behind no set is asked for
  kArgPoolKey = kNumInSets,
  kArgPoolValue,
  kArgPoolKeyScales,
  kArgPoolValueScales,
  kArgPageTable,
  kArgPositions,
  kArgCos,
  kArgSin,
  kNumArguments,
};
static_assert(kNumInSets <= kMostInSets && kNumArguments <= kMaxArguments);

constexpr ArgumentSet only(int argument) { return ArgumentSet{1} << argument; }

// The call with these tensors, with a beam dim everywhere: [batch, beam, time, vector]; lengths and offsets [batch, beam].
Call call_of(const LayerDesc& desc, const LayerForwardArgs& args);
void set_weights(const LayerWeights& weights, int first_argument, Call* call);
void set_norm(const NormWeights& weights, int first_argument, Call* call);
// How many there are.
size_t set_captures(std::span<const Tensor> captures, int first_argument, Call* call);

// A layer's or an attention block's call with its gradients, and what comes in.
template <class Args>
void set_gradients(const Args& args, Call* call) {
  call->tensors[kArgGradOut] = with_beam(args.grad_out, 4);
  call->tensors[kArgGradQuery] = with_beam(args.grad_query, 4);
  call->tensors[kArgGradKey] = with_beam(args.grad_key, 4);
  call->tensors[kArgGradValue] = with_beam(args.grad_value, 4);
  call->tensors[kArgGradBias] = args.grad_attn_bias;
  call->tensors[kArgGradSlopes] = args.grad_alibi_slopes;
  call->tensors[kArgGradSinks] = args.grad_sink_logits;
  call->num_grad_captures = set_captures(args.grad_captures, kArgGradCaptures, call);
  set_weights(args.grad_weights, kArgGradWeights, call);
  call->accumulate = args.accumulate;
}

// What calls of a layer are given, or of the block around it, in the order in which it is checked.
void expect_arguments(const LayerState& s, Pass pass, const NormBlock* block, StepList* list);

}  // namespace polyhead
