// Attention whose keys were split over calls, machines or time: the parts' results joined to the result of the whole.
//   L = log sum_i exp(L_i)     w_i = exp(L_i - L)     O = sum_i w_i O_i
// A part that sees no key (L_i = -inf) changes nothing, whatever its O_i holds. Where no part sees a key: O = 0, L = -inf.
//
// Each part's call counts its keys from 0: where causal, window or ALiBi is used, the part that begins at key k of the
// whole has a query_offset less by k. Dropout needs a dropout_offset for each part, or two parts drop the same places.
#pragma once

#include <span>

#include "polyhead/api.h"
#include "polyhead/executor.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead {

/// What one part's forward call wrote, or its gradients.
struct Partial {
  Tensor out = {};        ///< [B, Sq, H, Dv]   packed: [total_q, H, Dv]; float32, bfloat16, float16 or float64
  Tensor logsumexp = {};  ///< [B, H, Sq]       packed: [H, total_q]; float32 (float64 with float64 out)
};

/// Joins one or more parts of one shape, any strides, any mix of float32, bfloat16 and float16, or all float64. Parts that
/// are joined one after the other are best float32 (AttentionDesc::out_dtype), `merged` too until the last: else each step
/// rounds. `merged` is written, rounded once to its own dtype; its logsumexp may be not given.
/// Each of its tensors may be one of a part's (the same pointer and strides), so that parts can be joined one after the
/// other in place; it must not overlap them otherwise. Sums are float32 (float64 with float64 out), in the order of the
/// parts. `executor` null: default_executor().
POLYHEAD_API Status merge(std::span<const Partial> parts, const Partial& merged, Executor* executor = nullptr);

/// Gradients of merge: dO_i = w_i dO, dL_i = w_i (dO . (O_i - O) + dL). `parts` are all or some of those that merge()
/// joined to `merged`; `grad_merged` has the gradients of `merged` (logsumexp may be not given: 0). `grad_parts` are
/// written: as many as parts; a tensor that is not given is not computed. A part that sees no key gets 0.
///
/// Not needed for training: Plan::backward on each part, with the out and logsumexp (and their gradients) of `merged` in
/// place of the part's own, gives the part's share of the whole's gradients at once.
POLYHEAD_API Status merge_backward(std::span<const Partial> parts, const Partial& merged, const Partial& grad_merged,
                                   std::span<const Partial> grad_parts, Executor* executor = nullptr);

}  // namespace polyhead
