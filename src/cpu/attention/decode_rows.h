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

// Asks for what lies `ahead` bytes behind p, which some later block will read.
template <class Element>
inline void prefetch_ahead(const Element* p, ptrdiff_t ahead) {
  __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(ahead)), 0,
                     3);
}

// Keys or values of a few rows, in place or copied.
template <class Row>
struct RowsAt {
  const typename Row::Element* data;
  ptrdiff_t stride;
  int num_rows;
  ptrdiff_t ahead;  // bytes from here to the rows that will be read next
};

// Rows [first, first + num_rows) where they lie.
template <class Row>
RowsAt<Row> rows_in_place(const Rows& x, int64_t first, int num_rows, const char* ahead) {
  using Element = typename Row::Element;
  const char* data = x.row(first);
  return {reinterpret_cast<const Element*>(data), x.row_bytes / static_cast<ptrdiff_t>(sizeof(Element)), num_rows,
          ahead - data};
}

// Calls use(rows, columns) for keys as Row reads them: in place, or, where their columns are not neighbours, copied as
// words. `ahead` is what will be read next.
template <class Row, class Use>
inline void with_keys(const Rows& x, int64_t first, int num_rows, int64_t dim, const char* ahead, float* copy,
                      const Use& use) {
  if (x.column_stride == 1) return use(rows_in_place<Row>(x, first, num_rows, ahead), dim);
  using Mac = typename Row::Mac;
  const int64_t words = words_of(dim, Mac::kElements);
  copy_rows<Mac>(copy, x, first, num_rows, num_rows, dim);
  if constexpr (Mac::kElements == 2) {
    use(RowsAt<Row>{reinterpret_cast<const typename Row::Element*>(copy), 2 * words, num_rows, 0}, 2 * words);
  } else {
    use(RowsAt<FloatRow>{copy, words, num_rows, 0}, dim);
  }
}

// Calls use(rows) for values likewise, which are copied as floats. With `finite`, NaN and inf are taken as 0.
template <class Row, class Use>
inline void with_values(const Rows& x, int64_t first, int num_rows, int64_t dim, bool finite, const char* ahead,
                        float* copy, const Use& use) {
  if (x.column_stride == 1 && !finite) return use(rows_in_place<Row>(x, first, num_rows, ahead));
  copy_values<Float32>(copy, dim, x, first, num_rows, num_rows, dim, finite);
  use(RowsAt<FloatRow>{copy, dim, num_rows, 0});
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
