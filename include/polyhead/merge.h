// Attention whose keys were split over calls, machines or time: the parts' results joined to the result of the whole.
//   L = log sum_i exp(L_i)     w_i = exp(L_i - L)     O = sum_i w_i O_i
// A part that sees no key (L_i = -inf) changes nothing, whatever its O_i holds. Where no part sees a key: O = 0, L = -inf.
#pragma once

#include <span>

#include "polyhead/api.h"
#include "polyhead/executor.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead {

/// What one part's forward call wrote, or its gradients.
struct Partial {
  Tensor out = {};        ///< [B, Sq, H, Dv]   packed: [total_q, H, Dv]; the same dtype in all parts, any strides
  Tensor logsumexp = {};  ///< [B, H, Sq]       packed: [H, total_q]; float32 (float64 with float64 out)
};

/// Joins one or more parts. `merged` is written and may be one of the parts (the same tensors exactly), so that parts can
/// be added one after the other; it must not overlap them otherwise. `executor` null: default_executor().
POLYHEAD_API Status merge(std::span<const Partial> parts, const Partial& merged, Executor* executor = nullptr);

/// Gradients of merge: dO_i = w_i dO, dL_i = w_i (dO . (O_i - O) + dL). `merged` is what merge() wrote, `grad_merged` its
/// gradients (logsumexp may be not given: 0). `grad_parts` are written: as many as parts; a tensor that is not given is
/// not computed. Parts that see no key get 0.
POLYHEAD_API Status merge_backward(std::span<const Partial> parts, const Partial& merged, const Partial& grad_merged,
                                   std::span<const Partial> grad_parts, Executor* executor = nullptr);

}  // namespace polyhead
