// What a desc and the tensors of a call must satisfy before a kernel sees them: dtypes, shapes, strides, memory. What
// lies in the tensors is checked by the kernel, where they lie. Nothing is written; an error names the argument, what was
// expected and what came.
#pragma once

#include <cstddef>
#include <span>

#include "contract/attention_operands.h"
#include "polyhead/attention.h"
#include "polyhead/merge.h"

namespace polyhead {

Status check_desc(const AttentionDesc& desc);

// `desc` has passed check_desc, `planned` are its planned_operands(); `device` is where the tensors must lie. Allocates
// nothing unless there is an error.
Status check_forward_args(const AttentionDesc& desc, std::span<const PlannedOperand> planned, const ForwardArgs& args,
                          size_t workspace_bytes, Device device);
Status check_backward_args(const AttentionDesc& desc, std::span<const PlannedOperand> planned, const BackwardArgs& args,
                           size_t workspace_bytes, Device device);

Status check_merge(std::span<const Partial> parts, const Partial& merged);
Status check_merge_backward(std::span<const Partial> parts, const Partial& merged, const Partial& grad_merged,
                            std::span<const Partial> grad_parts);

// Whether no query sees a key, whatever the operands hold: some size is 0.
inline bool nothing_visible(const AttentionDesc& desc) {
  return desc.batch == 0 || desc.num_heads == 0 || desc.seqlen_q == 0 || desc.seqlen_k == 0;
}

}  // namespace polyhead
