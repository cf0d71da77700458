// Lengths, offsets and visible key ranges of each sequence: the part of the contract that every kernel shares.
#pragma once

#include <cstdint>

#include "contract/band.h"
#include "core/memory_size.h"
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
    s.len_q = integer_at(args.cu_seqlens_q, b + 1) - s.first_q;
  }
  if (desc.packed && desc.page_size == 0) {
    s.first_k = integer_at(args.cu_seqlens_k, b);
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

// The sequences of one call. Lengths, boundaries, offsets, windows and tables of pages are read once, checked as they are
// read, and from then on used from here alone: nobody who writes to the caller's arrays meanwhile can lead a kernel astray.
class Sequences {
 public:
  // Of the table, which stands at the start of a call's workspace: a multiple of 64; 0 where the desc tells all.
  static MemorySize table_bytes(const AttentionDesc& desc);

  // `table` has table_bytes and outlives this; null: the call is only checked. An error names the argument.
  Status read(const AttentionDesc& desc, const ForwardArgs& args, void* table);

  // Makes the windows and the table of pages of `args`, if it has some, those that were read: contiguous, int64.
  void replace_arrays(ForwardArgs* args) const;

  const Sequence& operator[](int64_t b) const { return table_ != nullptr ? table_[b] : same_; }

  // Packed: the first row behind the last sequence.
  int64_t end_q() const { return end_q_; }
  int64_t end_k() const { return end_k_; }

 private:
  const Sequence* table_ = nullptr;
  const int64_t* windows_ = nullptr;  // [2, seqlen_q]: lo, hi
  const int64_t* pages_ = nullptr;    // [batch, seqlen_k / page_size]; behind a length: not set
  Sequence same_;
  int64_t end_q_ = 0, end_k_ = 0;
};

// Whether sequences have lengths of their own: some rows of the operands may belong to none.
inline bool has_lengths(const AttentionDesc& desc) { return desc.packed || desc.has_seqlens_q || desc.has_seqlens_k; }

// Whether the lengths and boundaries of a call make sense, for one who uses none of them.
inline Status check_sequences(const AttentionDesc& desc, const ForwardArgs& args) {
  return Sequences().read(desc, args, nullptr);
}

// The option that needs to know where the diagonal lies ("causal"), if the desc uses one and does not say; else null.
const char* unaligned_option(const AttentionDesc& desc);

// Why `option` cannot do without an alignment. b < 0: true of every sequence.
Status alignment_missing(const char* option, int64_t b, int64_t len_q, int64_t len_k);

inline PerQuery per_query(const Tensor& t) {
  if (!t.given()) return {};
  return {t.data, t.dims[0] > 1 ? t.strides[0] : 0, t.dtype == DType::kInt64};
}

// Causal is a band whose right side is closed on the diagonal.
inline Band band(const AttentionDesc& desc, const ForwardArgs& args) {
  return {desc.window_left, desc.causal ? 0 : desc.window_right, per_query(args.window_lo), per_query(args.window_hi),
          desc.sink_keys};
}

// The keys that causal, windows and lengths let query i of a sequence see (mask and bias may hide more), beside sinks.
inline KeyRange key_range(const AttentionDesc& desc, const ForwardArgs& args, const Sequence& s, int64_t i) {
  return key_range(band(desc, args), s, i);
}

}  // namespace polyhead
