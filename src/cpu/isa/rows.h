// Rows of query, key, value and bias: read from any dtype and strides, transposed or copied into a kernel's words.
#pragma once

#include "cpu/isa/operand.h"
#include "cpu/isa/tile.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// A matrix [rows][columns] of one head.
struct Rows {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t stride = 0, column_stride = 0;  // elements
};

inline Rows rows_of(const Operand& x, int64_t b, int64_t h, int64_t first_row) {
  const int64_t at = b * x.stride_b + h * x.stride_h + first_row * x.stride_s;
  const int64_t element_bytes = x.dtype == DType::kFloat32 ? 4 : 2;
  return {static_cast<const char*>(x.data) + at * element_bytes, x.dtype, x.stride_s, x.stride_d};
}

inline const float* f32(const void* data) { return static_cast<const float*>(data); }
inline const uint16_t* u16(const void* data) { return static_cast<const uint16_t*>(data); }

// n <= kLanes elements of a row from column on, as floats; the lanes behind them are 0.
inline F load_columns(const Rows& x, int64_t row, int64_t column, int n) {
  const int64_t at = row * x.stride + column * x.column_stride;
  if (x.dtype == DType::kFloat32) {
    if (x.column_stride == 1) return n == kLanes ? load(f32(x.data) + at) : load_first(f32(x.data) + at, n);
    alignas(64) float buffer[kLanes] = {};
    for (int i = 0; i < n; ++i) buffer[i] = f32(x.data)[at + i * x.column_stride];
    return load(buffer);
  }
  alignas(32) uint16_t buffer[kLanes] = {};
  const uint16_t* source = u16(x.data) + at;
  if (n < kLanes || x.column_stride != 1) {
    for (int i = 0; i < n; ++i) buffer[i] = source[i * x.column_stride];
    source = buffer;
  }
  return x.dtype == DType::kBFloat16 ? load_bf16(source) : load_f16(source);
}

// n <= kLanes words of a row from word on; elements from `columns` on are 0.
template <class Mac>
inline F load_words(const Rows& x, int64_t row, int64_t word, int n, int64_t columns) {
  if constexpr (Mac::kElements == 1) {
    return load_columns(x, row, word, n);
  } else {
    const uint16_t* source = u16(x.data) + row * x.stride + 2 * word * x.column_stride;
    if (x.column_stride == 1 && 2 * (word + n) <= columns) return load_first(reinterpret_cast<const float*>(source), n);
    alignas(64) uint16_t buffer[2 * kLanes] = {};
    for (int i = 0; i < 2 * n && 2 * word + i < columns; ++i) buffer[i] = source[i * x.column_stride];
    return load(reinterpret_cast<const float*>(buffer));
  }
}

// Asks for rows that will be read soon. Hardware follows one stream, not 16 rows at once.
inline void prefetch_rows(const Rows& x, int64_t first_row, int64_t num_rows, int64_t columns) {
  if (x.column_stride != 1) return;  // rows apart in memory; of one column, the stride may be any number
  const int64_t element_bytes = x.dtype == DType::kFloat32 ? 4 : 2;
  const char* row = static_cast<const char*>(x.data) + first_row * x.stride * element_bytes;
  const int64_t bytes = columns * element_bytes;
  for (int64_t r = 0; r < num_rows; ++r, row += x.stride * element_bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
  }
}

// Rows that will be read or written soon, asked for a few at a time while something else is computed: a burst of them
// would wait for memory as the rows themselves do.
class RowsAhead {
 public:
  void clear() { count_ = at_ = 0; }

  void add(const Rows& x, int64_t first_row, int64_t num_rows, int64_t columns) {
    if (at_ == count_) clear();
    if (count_ == kMost || x.data == nullptr || x.column_stride != 1 || num_rows <= 0) return;
    const int64_t element_bytes = x.dtype == DType::kFloat32 ? 4 : 2, stride = x.stride * element_bytes;
    range_[count_++] = {static_cast<const char*>(x.data) + first_row * stride, stride, num_rows,
                        columns * element_bytes};
  }

  void ask(int num_rows) {
    for (; num_rows > 0 && at_ < count_; --num_rows) {
      Range& range = range_[at_];
      for (int64_t byte = 0; byte < range.bytes; byte += 64) __builtin_prefetch(range.row + byte, 0, 2);
      range.row += range.stride;
      if (--range.rows == 0) ++at_;
    }
  }

 private:
  static constexpr int kMost = 8;
  struct Range {
    const char* row;
    int64_t stride, rows, bytes;
  };
  Range range_[kMost];
  int count_ = 0, at_ = 0;
};

inline int64_t words_of(int64_t elements, int elements_per_word) {
  return (elements + elements_per_word - 1) / elements_per_word;
}

// Whether rows are words as they lie, so that whole vectors of them can be loaded.
template <class Mac>
inline bool plain_words(const Rows& x) {
  return x.dtype == (Mac::kElements == 1 ? DType::kFloat32 : DType::kBFloat16) && x.column_stride == 1;
}

// out[word][lane] = word of row `lane`; lanes from `num_rows` on are 0. kTile lanes.
template <class Mac>
void transpose_rows(float* out, const Rows& x, int64_t num_rows, int64_t columns) {
  const int64_t words = words_of(columns, Mac::kElements);
  const int64_t whole_words = plain_words<Mac>(x) ? columns / Mac::kElements : 0;
  const ptrdiff_t row_bytes = x.stride * (Mac::kElements == 1 ? 4 : 2);
  for (int lane = 0; lane < kTile; lane += kLanes) {
    const char* rows = static_cast<const char*>(x.data) + lane * row_bytes;
    for (int64_t word = 0; word < words; word += kLanes) {
      F block[kLanes];
      if (word + kLanes <= whole_words && lane + kLanes <= num_rows) {
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) block[r] = load(reinterpret_cast<const float*>(rows + r * row_bytes) + word);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(out + (word + i) * kTile + lane, block[i]);
        continue;
      }
      const int n = words - word < kLanes ? static_cast<int>(words - word) : kLanes;
      for (int r = 0; r < kLanes; ++r) {
        block[r] = lane + r < num_rows ? load_words<Mac>(x, lane + r, word, n, columns) : broadcast(0.0f);
      }
      transpose(block);
      for (int i = 0; i < n; ++i) store(out + (word + i) * kTile + lane, block[i]);
    }
  }
}

// out[row][word], rows from num_rows to padded_rows 0.
template <class Mac>
void copy_rows(float* out, const Rows& x, int64_t first_row, int64_t num_rows, int64_t padded_rows, int64_t columns) {
  const int64_t words = words_of(columns, Mac::kElements);
  for (int64_t r = 0; r < padded_rows; ++r) {
    for (int64_t word = 0; word < words; word += kLanes) {
      const int n = words - word < kLanes ? static_cast<int>(words - word) : kLanes;
      const F x_r = r < num_rows ? load_words<Mac>(x, first_row + r, word, n, columns) : broadcast(0.0f);
      store_first(out + r * words + word, x_r, n);
    }
  }
}

inline F finite_or_zero(F x) { return select(equal(x - x, broadcast(0.0f)), x, broadcast(0.0f)); }

// Rows as words along the rows: out[row / kElements][d], columns from `dim` to `out_stride` 0. With `finite`, NaN and inf
// become 0.
template <class Mac>
void copy_values(float* out, int64_t out_stride, const Rows& x, int64_t first_row, int64_t num_rows,
                 int64_t padded_rows, int64_t dim, bool finite) {
  if (Mac::kElements == 1 && !finite && plain_words<Mac>(x) && dim % kLanes == 0 && num_rows == padded_rows) {
    const float* row = f32(x.data) + first_row * x.stride;
    for (int64_t i = 0; i < num_rows; ++i, row += x.stride, out += out_stride) {
      for (int64_t d = 0; d < dim; d += kLanes) store(out + d, load(row + d));
    }
    return;
  }
  for (int64_t r = 0; r < padded_rows; r += Mac::kElements) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int n = dim - d < kLanes ? static_cast<int>(dim - d) : kLanes;
      F words = r < num_rows ? load_columns(x, first_row + r, d, n) : broadcast(0.0f);
      if (finite) words = finite_or_zero(words);
#ifdef POLYHEAD_HAS_BF16_DOT
      if constexpr (Mac::kElements == 2) {
        F odd = r + 1 < num_rows ? load_columns(x, first_row + r + 1, d, n) : broadcast(0.0f);
        if (finite) odd = finite_or_zero(odd);
        words = pair_bf16(words, odd);
      }
#endif
      store_first(out + (r / Mac::kElements) * out_stride + d, words,
                  out_stride - d < kLanes ? static_cast<int>(out_stride - d) : kLanes);
    }
  }
}

// Copying costs 1 to 2 % of a task of several tiles. Reading in place needs words of the right type, and rows that are not a
// multiple of 1 KiB apart: those fall into few sets of the L1 cache ([B, S, H, D] with 16 heads of 64 has such rows).
template <class Mac>
bool readable_in_place(const Rows& x, int64_t columns) {
  return plain_words<Mac>(x) && columns % Mac::kElements == 0 && x.stride % Mac::kElements == 0 &&
         (x.stride == columns || x.stride % 256 != 0);
}

// Rows as words along the columns. Rows from num_rows to padded_rows are 0.
template <class Mac>
Words rows_as_words(float* copy, const Rows& x, int64_t first_row, int64_t num_rows, int64_t padded_rows,
                    int64_t columns) {
  if (num_rows == padded_rows && readable_in_place<Mac>(x, columns)) {
    const ptrdiff_t stride = x.stride / Mac::kElements;
    return {f32(x.data) + first_row * stride, stride};
  }
  copy_rows<Mac>(copy, x, first_row, num_rows, padded_rows, columns);
  return {copy, static_cast<ptrdiff_t>(words_of(columns, Mac::kElements))};
}

// Rows as words along the rows, as copy_values writes them.
template <class Mac>
Words values_as_words(float* copy, const Rows& x, int64_t first_row, int64_t num_rows, int64_t padded_rows,
                      int64_t columns, bool finite) {
  if (Mac::kElements == 1 && num_rows == padded_rows && !finite && readable_in_place<Mac>(x, columns)) {
    return {f32(x.data) + first_row * x.stride, x.stride};
  }
  copy_values<Mac>(copy, columns, x, first_row, num_rows, padded_rows, columns, finite);
  return {copy, columns};
}

// Rows as words along the rows, in panels of `panel` columns: out[column / panel][row / kElements][panel].
template <class Mac>
void copy_panels(float* out, int64_t panel_stride, int panel, const Rows& x, int64_t first_row, int64_t num_rows,
                 int64_t padded_rows, int64_t columns, bool finite) {
  const int64_t element_bytes = x.dtype == DType::kFloat32 ? 4 : 2;
  for (int64_t c = 0; c < columns; c += panel, out += panel_stride) {
    const Rows from{static_cast<const char*>(x.data) + c * x.column_stride * element_bytes, x.dtype, x.stride,
                    x.column_stride};
    copy_values<Mac>(out, panel, from, first_row, num_rows, padded_rows, columns - c < panel ? columns - c : panel,
                     finite);
  }
}

// Whether no element is NaN or inf.
inline bool all_finite(const Rows& x, int64_t first_row, int64_t num_rows, int64_t columns) {
  F sum = broadcast(0.0f);  // NaN as soon as one term is NaN or inf
  for (int64_t r = first_row; r < first_row + num_rows; ++r) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int n = columns - c < kLanes ? static_cast<int>(columns - c) : kLanes;
      sum = fma(load_columns(x, r, c, n), broadcast(0.0f), sum);
    }
  }
  return !any(negate(equal(sum, broadcast(0.0f))));
}

// Writes n <= kLanes floats of one row, converted.
inline void store_columns(void* data, DType dtype, int64_t at, int64_t column_stride, F x, int n) {
  if (dtype == DType::kFloat32 && column_stride == 1) {
    store_first(static_cast<float*>(data) + at, x, n);
    return;
  }
  if (dtype == DType::kFloat32) {
    alignas(64) float buffer[kLanes];
    store(buffer, x);
    for (int i = 0; i < n; ++i) static_cast<float*>(data)[at + i * column_stride] = buffer[i];
    return;
  }
  alignas(32) uint16_t buffer[kLanes];
  uint16_t* target = static_cast<uint16_t*>(data) + at;
  uint16_t* whole = n == kLanes && column_stride == 1 ? target : buffer;
  if (dtype == DType::kBFloat16) {
    store_bf16(whole, x);
  } else {
    store_f16(whole, x);
  }
  if (whole == buffer) {
    for (int i = 0; i < n; ++i) target[i * column_stride] = buffer[i];
  }
}

// The same, added to what is there if `accumulate`.
inline void store_sum(void* data, DType dtype, int64_t at, int64_t column_stride, F x, int n, bool accumulate) {
  if (accumulate) x = x + load_columns({data, dtype, 1, column_stride}, at, 0, n);
  store_columns(data, dtype, at, column_stride, x, n);
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
