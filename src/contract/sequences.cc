#include "contract/sequences.h"

#include <memory>

#include "core/sentence.h"

namespace polyhead {
namespace {

Status read_lengths(const char* name, const Tensor& lengths, const char* limit_name, int64_t limit, Sequence* table,
                    int64_t Sequence::*length) {
  for (int64_t b = 0; b < lengths.dims[0]; ++b) {
    const int64_t read = integer_at(lengths, b);
    if (table != nullptr) table[b].*length = read;
    if (read < 0 || read > limit) {
      return invalid(sentence(name, "[", b, "] is ", read, ", must be 0 to ", limit_name, " ", limit));
    }
  }
  return {};
}

// Boundaries [batch + 1]: sequence b has the rows from the b-th to the next.
Status read_boundaries(const char* name, const Tensor& starts, const char* limit_name, int64_t limit, Sequence* table,
                       int64_t Sequence::*first, int64_t Sequence::*length, int64_t* end) {
  int64_t last = integer_at(starts, 0);
  if (last != 0) return invalid(sentence(name, "[0] is ", last, ", must be 0"));
  for (int64_t b = 1; b < starts.dims[0]; ++b) {
    const int64_t start = integer_at(starts, b);
    if (start < last) {
      return invalid(sentence(name, "[", b, "] is ", start, ", must not be less than the ", last, " before it"));
    }
    if (table != nullptr) table[b - 1].*first = last, table[b - 1].*length = start - last;
    last = start;
  }
  *end = last;
  if (last <= limit) return {};
  return invalid(sentence(name, " ends at ", last, ", must be at most ", limit_name, " ", limit));
}

// The pages that lengths reach into. `pages` [batch, entries of a row]: where they go; null: they are only checked, and
// `sequences`, which has the lengths that were read, is null too.
Status read_pages(const AttentionDesc& desc, const ForwardArgs& args, const Sequence* sequences, int64_t* pages) {
  const Tensor& table = args.page_table;
  Tensor row = table;
  row.strides[0] = table.strides[1];
  for (int64_t b = 0; b < desc.batch; ++b) {
    const int64_t length = sequences != nullptr ? sequences[b].len_k : integer_at(args.seqlens_k, b);
    const int64_t used = pieces(length, desc.page_size);
    if (used == 0) continue;  // a table without columns may have any strides
    row.data =
        static_cast<char*>(table.data) + b * table.strides[0] * static_cast<int64_t>(dtype_size_bytes(table.dtype));
    for (int64_t p = 0; p < used; ++p) {
      const int64_t page = integer_at(row, p);
      if (page < 0 || page >= desc.num_pages) {
        return invalid(sentence("page_table[", b, ", ", p, "] is ", page, ", must be 0 to num_pages - 1 = ",
                                desc.num_pages - 1, ": seqlens_k[", b, "] reaches into it"));
      }
      if (pages != nullptr) pages[b * table.dims[1] + p] = page;
    }
  }
  return {};
}

bool has_table(const AttentionDesc& desc) { return has_lengths(desc) || desc.has_query_offsets; }

MemorySize windows_bytes(const AttentionDesc& desc) {
  return desc.has_windows ? (MemorySize(desc.seqlen_q) * (2 * sizeof(int64_t))).rounded_up(64) : 0;
}

MemorySize pages_bytes(const AttentionDesc& desc) {
  if (desc.page_size == 0) return 0;
  return (MemorySize(desc.batch) * (desc.seqlen_k / desc.page_size) * sizeof(int64_t)).rounded_up(64);
}

MemorySize sequences_bytes(const AttentionDesc& desc) {
  return has_table(desc) ? (MemorySize(desc.batch) * sizeof(Sequence)).rounded_up(64) : 0;
}

void copy_integers(const Tensor& from, int64_t* to) {
  for (int64_t i = 0; i < from.dims[0]; ++i) to[i] = integer_at(from, i);
}

int64_t offset_of(const AttentionDesc& desc, const Sequence& s) {
  if (desc.query_offset) return *desc.query_offset;
  return desc.align == Align::kBottomRight ? s.len_k - s.len_q : 0;
}

}  // namespace

MemorySize Sequences::table_bytes(const AttentionDesc& desc) {
  return sequences_bytes(desc) + windows_bytes(desc) + pages_bytes(desc);
}

Status Sequences::read(const AttentionDesc& desc, const ForwardArgs& args, void* memory) {
  same_ = {0, 0, desc.seqlen_q, desc.seqlen_k, 0};
  same_.offset = offset_of(desc, same_);
  if (desc.has_windows && memory != nullptr) {
    auto* const windows = reinterpret_cast<int64_t*>(static_cast<char*>(memory) + sequences_bytes(desc).value());
    copy_integers(args.window_lo, windows);
    copy_integers(args.window_hi, windows + desc.seqlen_q);
    windows_ = windows;
  }
  if (!has_table(desc)) return {};
  Sequence* const table = static_cast<Sequence*>(memory);
  if (table != nullptr) std::uninitialized_fill_n(table, desc.batch, same_);
  Status status;
  if (desc.has_seqlens_q) {
    status = read_lengths("seqlens_q", args.seqlens_q, "seqlen_q", desc.seqlen_q, table, &Sequence::len_q);
  }
  if (status.ok() && desc.has_seqlens_k) {
    status = read_lengths("seqlens_k", args.seqlens_k, "seqlen_k", desc.seqlen_k, table, &Sequence::len_k);
  }
  if (status.ok() && desc.packed) {
    status = read_boundaries("cu_seqlens_q", args.cu_seqlens_q, "total_q", desc.seqlen_q, table, &Sequence::first_q,
                             &Sequence::len_q, &end_q_);
  }
  if (status.ok() && desc.packed && desc.page_size == 0) {
    status = read_boundaries("cu_seqlens_k", args.cu_seqlens_k, "total_k", desc.seqlen_k, table, &Sequence::first_k,
                             &Sequence::len_k, &end_k_);
  }
  if (status.ok() && desc.page_size > 0) {
    int64_t* const pages = memory == nullptr
                               ? nullptr
                               : reinterpret_cast<int64_t*>(static_cast<char*>(memory) +
                                                            (sequences_bytes(desc) + windows_bytes(desc)).value());
    status = read_pages(desc, args, table, pages);
    pages_ = pages;
  }
  if (!status.ok()) return status;
  const char* const option = has_lengths(desc) ? unaligned_option(desc) : nullptr;
  const bool looks = table != nullptr || option != nullptr;
  for (int64_t b = 0; looks && b < desc.batch; ++b) {
    const Sequence s = table != nullptr ? table[b] : sequence(desc, args, b);
    if (option != nullptr && s.len_q != s.len_k) return alignment_missing(option, b, s.len_q, s.len_k);
    if (table == nullptr) continue;
    table[b].offset = desc.has_query_offsets ? integer_at(args.query_offsets, b) : offset_of(desc, s);
  }
  table_ = table;
  return {};
}

void Sequences::replace_arrays(ForwardArgs* args) const {
  if (pages_ != nullptr)
    args->page_table = Tensor(pages_, DType::kInt64, {args->page_table.dims[0], args->page_table.dims[1]});
  if (windows_ == nullptr) return;
  const int64_t queries = args->window_lo.dims[0];
  args->window_lo = Tensor(windows_, DType::kInt64, {queries});
  args->window_hi = Tensor(windows_ + queries, DType::kInt64, {queries});
}

const char* unaligned_option(const AttentionDesc& desc) {
  if (desc.align != Align::kUnset || desc.query_offset || desc.has_query_offsets) return nullptr;
  if (desc.causal) return "causal";
  if (desc.window_left >= 0 || desc.window_right >= 0) return "window";
  return desc.alibi_slopes_ndim > 0 ? "alibi_slopes" : nullptr;
}

Status alignment_missing(const char* option, int64_t b, int64_t len_q, int64_t len_k) {
  return invalid(sentence(option, " needs align: ", b < 0 ? "" : sentence("sequence ", b, " has "), "seqlen_q ", len_q,
                          b < 0 ? " is not seqlen_k " : " and seqlen_k ", len_k,
                          ". Set align to top_left (query 0 stands at key 0) or bottom_right (the last query at the "
                          "last key), or give query_offset"));
}

}  // namespace polyhead
