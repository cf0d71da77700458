// What a desc and the tensors of a call must satisfy before a kernel sees them. Nothing is written; an error names the
// argument, what was expected and what came.
#pragma once

#include <cstddef>
#include <span>

#include "polyhead/attention.h"
#include "polyhead/merge.h"

namespace polyhead {

Status check_desc(const AttentionDesc& desc);

// `desc` has passed check_desc. Allocates nothing unless there is an error.
Status check_forward_args(const AttentionDesc& desc, const ForwardArgs& args, size_t workspace_bytes);

Status check_backward_args(const AttentionDesc& desc, const BackwardArgs& args, size_t workspace_bytes);

Status check_merge(std::span<const Partial> parts, const Partial& merged);
Status check_merge_backward(std::span<const Partial> parts, const Partial& merged, const Partial& grad_merged,
                            std::span<const Partial> grad_parts);

// The option that needs to know where the diagonal lies ("causal"), if the desc uses one and does not say; else null.
const char* unaligned_option(const AttentionDesc& desc);

// Why `option` cannot do without an alignment. b < 0: true of every sequence.
Status alignment_missing(const char* option, int64_t b, int64_t len_q, int64_t len_k);

// Whether no query sees a key, whatever the operands hold: some size is 0.
inline bool nothing_visible(const AttentionDesc& desc) {
  return desc.batch == 0 || desc.num_heads == 0 || desc.seqlen_q == 0 || desc.seqlen_k == 0;
}

}  // namespace polyhead
