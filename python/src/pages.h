// Keys and values in pages, as both bindings tell the library of them.
#pragma once

#include "polyhead/attention.h"

namespace polyhead::python {

// Of key [num_pages, page_size, ...] and page_table [batch, pages of a sequence]. A page without rows: page_size is 0.
inline void set_pages(const Tensor& key, const Tensor& page_table, AttentionDesc& desc) {
  desc.num_pages = key.dims[0];
  desc.page_size = key.dims[1];
  if (__builtin_mul_overflow(page_table.dims[1], desc.page_size, &desc.seqlen_k)) desc.seqlen_k = INT64_MAX;
}

}  // namespace polyhead::python
