// The calls of polyhead.MultiHeadAttention and AttentionBlock.
#pragma once

#include "cache_call.h"
#include "call.h"
#include "polyhead/layer.h"

namespace polyhead::python {

// Behind those of the cache.
enum LayerCachePosition : int {
  kCachePageTable = kNumCacheShared,
  kCacheSlots,
  kCachePositions,
  kCacheCos,
  kCacheSin,
  kNumLayerCache,
};

// Behind the arguments that attention has too, of which query, key and value are vectors: [batch, seqlen, size]. Key not
// given: it is query, where the call has keys; value likewise key. cu_seqlens and dropout_origin are None.
enum LayerPosition : int {
  kLayerWeights = kNumShared,  // kNumWeightKinds, in that order: [size, heads * head_dim], [heads * head_dim]
  kNumHeads = kLayerWeights + kNumWeightKinds,
  kNumHeadsKv,
  kOutputDropoutP,
  kOutputDropoutSeed,
  kWindowLo,
  kWindowHi,
  kLayerReturnWeights,
  kLayerNormKind,  // a number of NormKind: a block; None: a layer without norm and residual, and what else there may be
  kLayerNormFirst,
  kLayerNormEps,
  kLayerResidual,
  kLayerNormWeight,
  kLayerNormBias,
  kNumLayerShared,
  // forward
  kKeyCache = kNumLayerShared,
  kValueCache,
  kStep,         // -1: all of them
  kStepSeqlenQ,  // how many steps there are; of one step alone
  kStepAppends,  // key and value of the step go into the caches
  kKeep,         // a reserve, for backward
  kLayerCache,   // what a call of a cache is given first (cache_call.h), or None and what else there may be
  kNumLayerForward = kLayerCache + kNumLayerCache,
  // backward
  kLayerGradOut = kNumLayerShared,
  kReserve,
  kLayerNeeds,          // bits: query, key, value, attn_bias, alibi_slopes, sink_logits
  kLayerNeedsCaptured,  // a tuple of names
  kLayerGradWeights,    // kNumWeightKinds arrays to write, or None
  kLayerGradNormWeight = kLayerGradWeights + kNumWeightKinds,
  kLayerGradNormBias,
  kNumLayerBackward,
};

// -> (out, attn_weights, reserve); what was not asked for is None
nb::object layer_forward(PyObject* const* arguments);

// -> (gradients by query, key, value, attn_bias, alibi_slopes, sink_logits, {name: by what is captured}); None where needs has no bit.
// That by query has that by key, too, where key was not given, and that by key likewise value's.
nb::object layer_backward(PyObject* const* arguments);

}  // namespace polyhead::python
