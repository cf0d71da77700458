// The loader of decoding: a few rows of keys or values as vectors along head_dim read them, and the asking for later rows.
#pragma once

#include "cpu/isa/rows.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// How vectors of a row are read: `first` reads n elements, the lanes behind them are 0.
struct FloatRow {
  using Element = float;
  using Mac = Float32;
  static inline F whole(const float* p) { return load(p); }
  static inline F first(const float* p, int n) { return load_first(p, n); }
};
struct BFloat16Row {
  using Element = uint16_t;
  using Mac = Float32;
  static inline F whole(const uint16_t* p) { return load_bf16(p); }
  static inline F first(const uint16_t* p, int n) { return load_bf16_first(p, n); }
};
struct Float16Row {
  using Element = uint16_t;
  using Mac = Float32;
  static inline F whole(const uint16_t* p) { return load_f16(p); }
  static inline F first(const uint16_t* p, int n) { return load_f16_first(p, n); }
};
#ifdef POLYHEAD_HAS_BF16_DOT
struct BFloat16PairRow {
  using Element = uint16_t;
  using Mac = BFloat16Pair;
  static inline F whole(const uint16_t* p) { return load(reinterpret_cast<const float*>(p)); }
  static inline F first(const uint16_t* p, int n) {
    if (n % 2 == 0) return load_first(reinterpret_cast<const float*>(p), n / 2);
    alignas(64) uint16_t buffer[2 * kLanes] = {};
    for (int i = 0; i < n; ++i) buffer[i] = p[i];
    return load(reinterpret_cast<const float*>(buffer));
  }
};
#endif

// What will be read soon, asked for line after line in the order in which it lies, whatever the order of reading: memory
// and the hardware's own prefetching follow a line that grows, not 16 rows at once. Rows of `row_bytes` bytes, then a gap.
struct Ahead {
  uintptr_t line = 0;
  ptrdiff_t left = 0, row_bytes = 0, gap = 0;

  // For kBytes bytes that are read.
  template <ptrdiff_t kBytes>
  inline __attribute__((always_inline)) void ask() {
#pragma GCC unroll 8
    for (ptrdiff_t at = 0; at < kBytes; at += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(line + static_cast<uintptr_t>(at)), 0, 2);
    }
    left -= kBytes;
    line += static_cast<uintptr_t>(kBytes + (left > 0 ? 0 : left + gap));
    left = left > 0 ? left : row_bytes;
  }
};

// Keys or values of a few rows, in place or copied.
template <class Row>
struct RowsAt {
  const typename Row::Element* data;
  ptrdiff_t stride;
  int num_rows;
};

// The first rows where they lie.
template <class Row>
RowsAt<Row> rows_in_place(const Rows& x, int num_rows) {
  using Element = typename Row::Element;
  return {reinterpret_cast<const Element*>(x.data), x.row_bytes / static_cast<ptrdiff_t>(sizeof(Element)), num_rows};
}

// Calls use(rows, columns) for the first keys as Row reads them: in place, or, where their columns are not neighbours, copied as
// words.
template <class Row, class Use>
inline void with_keys(const Rows& x, int num_rows, int64_t dim, float* copy, const Use& use) {
  if (x.column_stride == 1) return use(rows_in_place<Row>(x, num_rows), dim);
  using Mac = typename Row::Mac;
  const int64_t words = words_of(dim, Mac::kElements);
  copy_rows<Mac>(copy, x, 0, num_rows, num_rows, dim);
  if constexpr (Mac::kElements == 2) {
    use(RowsAt<Row>{reinterpret_cast<const typename Row::Element*>(copy), 2 * words, num_rows}, 2 * words);
  } else {
    use(RowsAt<FloatRow>{copy, words, num_rows}, dim);
  }
}

// Calls use(rows) for values likewise, which are copied as floats. With `finite`, NaN and inf are taken as 0.
template <class Row, class Use>
inline void with_values(const Rows& x, int num_rows, int64_t dim, bool finite, float* copy, const Use& use) {
  if (x.column_stride == 1 && !finite) return use(rows_in_place<Row>(x, num_rows));
  copy_values<Float32>(copy, dim, x, 0, num_rows, num_rows, dim, finite);
  use(RowsAt<FloatRow>{copy, dim, num_rows});
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
