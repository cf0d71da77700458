// Which weights dropout keeps: a pure function of (seed, offset, batch, head, query, key), the same on every kernel,
// device, tiling and number of threads.
#pragma once

#include <cstdint>

#include "polyhead/api.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead {

/// Where a call stands in a larger one whose mask it draws, as a shard over batch, heads, queries or keys does: its
/// element (b, h, i, j) has the bits of head index first_head + b * num_heads + h, query first_query + i and key
/// first_key + j. The defaults draw a mask of the call's own.
struct DropoutOrigin {
  int64_t first_head = 0;  ///< b0 * num_heads + h0, where (b0, h0) is what the call's batch element 0, head 0 is in all
  int64_t num_heads = 0;   ///< query heads in all; 0: as many as the call has
  int64_t first_query = 0;
  int64_t first_key = 0;  ///< a multiple of 8: eight keys share a counter

  bool operator==(const DropoutOrigin&) const = default;
};

/// Fills `kept` ([B, H, Sq, Sk], kBool) with 1 where dropout keeps the weight.
///
/// Element (b, h, i, j) is kept if its 16 random bits are >= floor(dropout_p * 65536 + 0.5). The bits come from
/// Philox4x32-10 (Salmon et al. 2011) with key words (seed & 0xffffffff, seed >> 32) and counter words
/// (b * H + h, i, j / 8, offset): j takes word (j % 8) / 2, its low half if j is even, else its high half.
/// H is num_heads, and b * H + h, i and j are counted from `dropout_origin`.
POLYHEAD_API Status dropout_mask(double dropout_p, uint64_t seed, uint32_t offset, const Tensor& kept,
                                 const DropoutOrigin& dropout_origin = {});

}  // namespace polyhead
