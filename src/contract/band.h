// Which keys causal, windows and lengths let a query see. Plain data and no library code: kernels compiled for one
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

// An int32 or int64 for each query of a sequence. No data: not given.
struct PerQuery {
  const void* data = nullptr;
  int64_t stride = 0;
  bool wide = false;  // int64
};

static inline int64_t at_query(const PerQuery& x, int64_t i) {
  return x.wide ? static_cast<const int64_t*>(x.data)[i * x.stride] : static_cast<const int32_t*>(x.data)[i * x.stride];
}

// Causal and window as one band around the diagonal; -1 = open. Causal is right = 0. Besides, where window_lo and
// window_hi are given, query i sees keys window_lo[i] <= j < window_hi[i] alone.
struct Band {
  int64_t left = -1, right = -1;
  PerQuery window_lo, window_hi;
  int64_t sink_keys = 0;  // keys [0, sink_keys) are seen whatever `left` and window_lo say
};

static inline bool is_open(const Band& band) {
  return band.left < 0 && band.right < 0 && band.window_lo.data == nullptr;
}

// The keys that band and lengths let query i of a sequence see (mask and bias may hide more), beside sinks: 0 <= begin <= end.
// Offset and windows may be any int64, so positions are summed in 128 bits.
static inline KeyRange key_range(const Band& band, const Sequence& s, int64_t i) {
  __extension__ using Wide = __int128;
  KeyRange range{0, i < s.len_q ? s.len_k : 0};
  const Wide position = static_cast<Wide>(i) + s.offset;
  if (band.right >= 0) {
    const Wide end = position + band.right + 1;
    if (end < range.end) range.end = end < 0 ? 0 : static_cast<int64_t>(end);
  }
  if (band.left >= 0) {
    const Wide first = position - band.left;
    if (first > 0) range.begin = first < range.end ? static_cast<int64_t>(first) : range.end;
  }
  if (band.window_lo.data != nullptr && band.window_hi.data != nullptr && range.end > 0) {
    const int64_t lo = at_query(band.window_lo, i), hi = at_query(band.window_hi, i);
    if (hi < range.end) range.end = hi < 0 ? 0 : hi;
    if (lo > range.begin) range.begin = lo;
    if (range.begin > range.end) range.begin = range.end;
  }
  return range;
}

// Keys [0, this) are seen besides, of a query with that range.
static inline int64_t sinks_end(const Band& band, const KeyRange& range) {
  return band.sink_keys < range.end ? band.sink_keys : range.end;
}

// Whether a query with that range sees key j >= 0.
static inline bool sees_key(int64_t sink_keys, const KeyRange& range, int64_t j) {
  return j < range.end && (j >= range.begin || j < sink_keys);
}

}  // namespace polyhead
