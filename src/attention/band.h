// Which keys causal, window and lengths let a query see. Plain data and no library code: kernels compiled for one
// instruction set include this too.
#pragma once

#include <cstdint>

namespace polyhead {

// One sequence of the batch. Rows of a packed operand start at first_q / first_k; otherwise those are 0.
struct Sequence {
  int64_t first_q = 0, first_k = 0;
  int64_t len_q = 0, len_k = 0;  // rows behind these are padding
  int64_t offset = 0;            // query i stands at key position i + offset
};

struct KeyRange {
  int64_t begin = 0, end = 0;  // [begin, end); empty if end <= begin
};

// Causal and window as one band around the diagonal; -1 = open. Causal is right = 0.
struct Band {
  int64_t left = -1, right = -1;
};

// a + b without overflow, for positions that a caller may set to any int64.
static inline int64_t saturating_add(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (!__builtin_add_overflow(a, b, &sum)) return sum;
  return a > 0 ? INT64_MAX : INT64_MIN;
}

// The keys that band and lengths let query i of a sequence see (mask and bias may hide more).
static inline KeyRange key_range(const Band& band, const Sequence& s, int64_t i) {
  KeyRange range{0, i < s.len_q ? s.len_k : 0};
  const int64_t position = saturating_add(i, s.offset);
  if (band.right >= 0) {
    const int64_t last = saturating_add(position, band.right);
    if (last < range.end) range.end = last < 0 ? 0 : last + 1;
  }
  if (band.left >= 0) {
    const int64_t first = saturating_add(position, -band.left);
    if (first > range.begin) range.begin = first;
  }
  return range;
}

}  // namespace polyhead
