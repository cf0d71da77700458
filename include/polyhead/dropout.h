// Which weights dropout keeps: a pure function of (seed, offset, batch, head, query, key), the same on every kernel,
// device, tiling and number of threads.
#pragma once

#include <cstdint>

#include "polyhead/api.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead {

/// Fills `kept` ([B, H, Sq, Sk], kBool) with 1 where dropout keeps the weight.
///
/// Element (b, h, i, j) is kept if its 16 random bits are >= floor(dropout_p * 65536 + 0.5). The bits come from
/// Philox4x32-10 (Salmon et al. 2011) with key words (seed & 0xffffffff, seed >> 32) and counter words
/// (b * H + h, i, j / 8, offset): j takes word (j % 8) / 2, its low half if j is even, else its high half.
POLYHEAD_API Status dropout_mask(double dropout_p, uint64_t seed, uint32_t offset, const Tensor& kept);

}  // namespace polyhead
