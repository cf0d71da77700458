// Keys and values as caches hold them, in pages and formats with scales, as both bindings tell the library of them.
#pragma once

#include <cstdint>
#include <optional>

#include "polyhead/attention.h"

namespace polyhead::python {

// Of key [num_pages, page_size, ...] and page_table [batch, pages of a sequence]. A page without rows: page_size is 0.
inline void set_pages(const Tensor& key, const Tensor& page_table, AttentionDesc& desc) {
  desc.num_pages = key.dims[0];
  desc.page_size = key.dims[1];
  if (__builtin_mul_overflow(page_table.dims[1], desc.page_size, &desc.seqlen_k)) desc.seqlen_k = INT64_MAX;
}

// Numbers of a row.
inline int64_t row_numbers(const Tensor& stored) {
  return stored.dims[stored.ndim - 1] * (stored.dtype == DType::kInt4x2 ? 2 : 1);
}

// Whether scales go with this dtype.
constexpr bool has_scales(DType d) {
  return d == DType::kInt8 || d == DType::kFloat8E4M3 || d == DType::kFloat8E5M2 || d == DType::kInt4x2;
}

// What key or value is stored in, and how many numbers share one of its scales.
inline void set_format(const Tensor& stored, const Tensor& scales, std::optional<DType>& dtype, int64_t& group) {
  if (!has_scales(stored.dtype)) return;
  dtype = stored.dtype;
  const int64_t groups = scales.given() ? scales.dims[scales.ndim - 1] : 1;
  group = groups > 1 ? row_numbers(stored) / groups : 0;
}

}  // namespace polyhead::python
