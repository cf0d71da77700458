// Keys and values of a problem in pages, as desc.page_size says.
#pragma once

#include "testing/operands.h"

namespace polyhead::testing {

struct Pages {
  Array key, value, key_scales, value_scales;  // [num_pages, page_size, heads, dim], or groups
  Array table;                                 // [batch, seqlen_k / page_size]
};

// Each sequence has its pages at random places of the pool; all other pages, and what lies behind a sequence's last page,
// hold NaN, and the table behind a length holds pages that do not exist. The pool must have enough.
Pages in_pages(const AttentionDesc& desc, const Inputs& in, uint64_t seed);

// As many pages as in_pages wants: those of all sequences, and a few that belong to nobody.
int64_t enough_pages(const AttentionDesc& desc);

}  // namespace polyhead::testing
