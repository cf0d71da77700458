// Lengths, offsets and visible key ranges of each sequence: the part of the contract that every kernel shares.
#pragma once

#include <cstdint>

#include "contract/band.h"
#include "polyhead/attention.h"

namespace polyhead {

// Element i of an int32 or int64 tensor [n].
inline int64_t integer_at(const Tensor& t, int64_t i) {
  const int64_t at = i * t.strides[0];
  return t.dtype == DType::kInt32 ? static_cast<const int32_t*>(t.data)[at] : static_cast<const int64_t*>(t.data)[at];
}

inline Sequence sequence(const AttentionDesc& desc, const ForwardArgs& args, int64_t b) {
  Sequence s{0, 0, desc.seqlen_q, desc.seqlen_k, 0};
  if (desc.packed) {
    s.first_q = integer_at(args.cu_seqlens_q, b);
    s.first_k = integer_at(args.cu_seqlens_k, b);
    s.len_q = integer_at(args.cu_seqlens_q, b + 1) - s.first_q;
    s.len_k = integer_at(args.cu_seqlens_k, b + 1) - s.first_k;
  }
  if (desc.has_seqlens_q) s.len_q = integer_at(args.seqlens_q, b);
  if (desc.has_seqlens_k) s.len_k = integer_at(args.seqlens_k, b);
  if (desc.has_query_offsets) {
    s.offset = integer_at(args.query_offsets, b);
  } else if (desc.query_offset) {
    s.offset = *desc.query_offset;
  } else if (desc.align == Align::kBottomRight) {
    s.offset = s.len_k - s.len_q;
  }
  return s;
}

inline PerQuery per_query(const Tensor& t) {
  if (!t.given()) return {};
  return {t.data, t.dims[0] > 1 ? t.strides[0] : 0, t.dtype == DType::kInt64};
}

// Causal is a band whose right side is closed on the diagonal.
inline Band band(const AttentionDesc& desc, const ForwardArgs& args) {
  return {desc.window_left, desc.causal ? 0 : desc.window_right, per_query(args.window_lo), per_query(args.window_hi)};
}

// The keys that causal, windows and lengths let query i of a sequence see (mask and bias may hide more).
inline KeyRange key_range(const AttentionDesc& desc, const ForwardArgs& args, const Sequence& s, int64_t i) {
  return key_range(band(desc, args), s, i);
}

}  // namespace polyhead
