// Where the elements of a strided view lie in memory, and whether two views share any.
#pragma once

#include <cstdint>

#include "polyhead/tensor.h"

namespace polyhead {

// Bytes [begin, end) between the first and the last byte of a view; empty for a view without elements.
struct MemoryRange {
  uintptr_t begin, end;
  bool intersects(const MemoryRange& other) const { return begin < other.end && other.begin < end; }
};

// False if the view's strides lead out of the address space.
[[nodiscard]] bool memory_range(const Tensor& t, MemoryRange* range);

// Whether two indices may name one element: each stride must pass the reach of all smaller ones. Strides >= 0. Views
// that interleave without sharing an element are rare enough to count as overlapping.
bool overlaps_itself(const Tensor& t);

// Whether two views may share a byte. Columns side by side in one buffer, as query | key | value | out, do not.
bool may_share_memory(const Tensor& a, const Tensor& b);

// Whether two views are the same elements in the same places; false for a tensor that is not given.
bool same_view(const Tensor& a, const Tensor& b);

}  // namespace polyhead
