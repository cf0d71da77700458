// The loader of rows: query, key, value, out and grad_out of one head, wherever they lie and of whatever dtype, as the words
// that kernels read: in place, copied or transposed. Nothing else knows how a row is found, what multiplies it, or reads a page
// table.
#pragma once

#include "cpu/isa/elements.h"
#include "cpu/isa/tile.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Where a row of a pool of pages lies: bytes behind row 0 of page 0, and those of its scales.
struct PoolPlace {
  int64_t data, scales;
};

// A matrix [rows][columns] of one head.
struct Rows {
  const char* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t row_bytes = 0, column_stride = 0;  // the latter in elements
  const PoolPlace* apart = nullptr;          // where each row lies, from data on; null: row_bytes apart

  // Of a dtype that has scales: each `group` columns have one.
  const char* scales = nullptr;
  int64_t scale_row_bytes = 0, scale_column_bytes = 0, group = 1;
  bool scaled_later = false;  // numbers are read as they are stored, stored_factor() times too small

  const char* row(int64_t row) const { return data + (apart != nullptr ? apart[row].data : row * row_bytes); }

  const char* scale(int64_t row, int64_t column) const {
    return scales + (apart != nullptr ? apart[row].scales : row * scale_row_bytes) +
           column / group * scale_column_bytes;
  }

  // Rows that lie apart begin at column 0.
  Rows from(int64_t first_row, int64_t first_column) const {
    Rows x = *this;
    if (apart != nullptr) {
      x.apart += first_row;
      return x;
    }
    x.data = row(first_row) + first_column * column_stride * element_bytes(dtype);
    if (scales != nullptr) x.scales += first_row * scale_row_bytes;
    return x;
  }
};

inline Rows rows_of(const Operand& x, int64_t b, int64_t h, int64_t first_row) {
  const int64_t bytes = element_bytes(x.dtype), at = b * x.stride_b + h * x.stride_h + first_row * x.stride_s;
  Rows rows{static_cast<const char*>(x.data) + at * bytes, x.dtype, x.stride_s * bytes, x.stride_d};
  if (x.scales == nullptr) return rows;
  const int64_t bytes_of_scale = scale_bytes(x.dtype);
  const int64_t scale = b * x.scale_stride_b + h * x.scale_stride_h + first_row * x.scale_stride_s;
  rows.scales = static_cast<const char*>(x.scales) + scale * bytes_of_scale;
  rows.scale_row_bytes = x.scale_stride_s * bytes_of_scale, rows.scale_column_bytes = x.scale_stride_d * bytes_of_scale;
  rows.group = x.group;
  return rows;
}

// The keys or values of one head of one sequence: rows one after the other, or page by page.
struct KeyRows {
  Rows rows;  // of page 0, where there are pages
  int64_t num_rows = 0;
  const int64_t* pages = nullptr;  // the sequence's, in order; null: there are none
  int64_t page_size = 1, page_bytes = 0, page_scale_bytes = 0;

  // Rows [first, first + n), from 0 on, that do not lie apart; no data: they do, or are not all there.
  Rows in_place(int64_t first, int64_t n) const {
    if (pages == nullptr) return rows.from(first, 0);
    if (n <= 0 || first + n > num_rows) return {};
    const int64_t page = first / page_size, within = first - page * page_size;
    if (within + n > page_size) return {};
    Rows x = rows.from(within, 0);
    x.data += pages[page] * page_bytes;
    if (x.scales != nullptr) x.scales += pages[page] * page_scale_bytes;
    return x;
  }

  // Rows [first, first + n), which are there. `places` [n] is memory for a list of those that lie apart.
  Rows at(int64_t first, int64_t n, PoolPlace* places) const {
    Rows x = in_place(first, n);
    if (x.data != nullptr || pages == nullptr) return x;
    list(first, n, places);
    x = rows;
    x.apart = places;
    return x;
  }

  void list(int64_t first, int64_t n, PoolPlace* places) const {
    int64_t page = first / page_size, within = first - page * page_size;
    for (int64_t i = 0; i < n; ++page, within = 0) {
      PoolPlace place = {pages[page] * page_bytes + within * rows.row_bytes,
                         pages[page] * page_scale_bytes + within * rows.scale_row_bytes};
      const int64_t left = page_size - within, end = left < n - i ? i + left : n;
      for (; i < end; ++i, place.data += rows.row_bytes, place.scales += rows.scale_row_bytes) places[i] = place;
    }
  }
};

inline KeyRows key_rows_of(const Operand& x, int64_t b, int64_t h, int64_t first_row, int64_t num_rows) {
  if (x.page_table == nullptr) return {rows_of(x, b, h, first_row), num_rows};
  return {rows_of(x, 0, h, 0),
          num_rows,
          x.page_table + b * x.pages_per_sequence,
          x.page_size,
          x.stride_b * element_bytes(x.dtype),
          x.scale_stride_b * scale_bytes(x.dtype)};
}

// A scale of numbers of that dtype.
inline F load_scale(DType dtype, const char* scale) {
  return dtype == DType::kInt4x2 ? from_halves(Halves{} + *u16(scale)) : broadcast(*f32(scale));
}

// load_columns where there are scales. Never inlined: what has none does without its registers.
inline __attribute__((noinline)) F load_scaled(const Rows& x, int64_t row, int64_t column, int n) {
  const F stored = load_stored(x.row(row), x.dtype, column, x.column_stride, n);
  if (x.scaled_later) return stored;
  const F scaled = stored * broadcast(stored_factor(x.dtype)) * load_scale(x.dtype, x.scale(row, column));
  return n == kLanes ? scaled : select(mask_from_bits((1u << n) - 1), scaled, broadcast(0.0f));
}

// n <= kLanes numbers of a row from column on, as floats; the lanes behind them are 0. Where there are scales, they are of one
// group.
inline F load_columns(const Rows& x, int64_t row, int64_t column, int n) {
  if (__builtin_expect(x.scales != nullptr, 0)) return load_scaled(x, row, column, n);
  return load_elements(x.row(row), x.dtype, column * x.column_stride, x.column_stride, n);
}

// Writes numbers of a row of a dtype that has scales, as load_columns reads them, as far as whole vectors go: how many.
template <DType kStored>
int64_t copy_scaled(float* out, const Rows& x, int64_t row, int64_t columns) {
  const int64_t end = columns / kLanes * kLanes;
  const auto* const numbers = reinterpret_cast<const uint8_t*>(x.row(row));
  const char* scale = x.scale(row, 0);
  for (int64_t d = 0; d < end;
       scale += x.scale_column_bytes) {  // groups are whole vectors, but for the one of a whole row
    const F factor = load_scale(kStored, scale);
    const int64_t end_of_group = end < d + x.group ? end : d + x.group;
    for (; d < end_of_group; d += kLanes) {
      const F stored = load_stored(numbers + (kStored == DType::kInt4x2 ? d / 2 : d), kStored);
      store(out + d, stored * broadcast(stored_factor(kStored)) * factor);
    }
  }
  return end;
}

// How many numbers copy_scaled has written, of any dtype; 0 where there are no scales, or numbers apart from each other.
inline int64_t copy_scaled_columns(float* out, const Rows& x, int64_t row, int64_t columns) {
  if (x.scales == nullptr || x.scaled_later || x.column_stride != 1) return 0;
  switch (x.dtype) {
    case DType::kInt8: return copy_scaled<DType::kInt8>(out, x, row, columns);
    case DType::kInt4x2: return copy_scaled<DType::kInt4x2>(out, x, row, columns);
    case DType::kFloat8E5M2: return copy_scaled<DType::kFloat8E5M2>(out, x, row, columns);
    default: return copy_scaled<DType::kFloat8E4M3>(out, x, row, columns);
  }
}

// n <= kLanes words of a row from word on; elements from `columns` on are 0.
template <class Mac>
inline F load_words(const Rows& x, int64_t row, int64_t word, int n, int64_t columns) {
  if constexpr (Mac::kElements == 1) {
    return load_columns(x, row, word, n);
  } else {
    const uint16_t* source = u16(x.row(row)) + 2 * word * x.column_stride;
    if (x.column_stride == 1 && 2 * (word + n) <= columns) return load_first(reinterpret_cast<const float*>(source), n);
    alignas(64) uint16_t buffer[2 * kLanes] = {};
    for (int i = 0; i < 2 * n && 2 * word + i < columns; ++i) buffer[i] = source[i * x.column_stride];
    return load(reinterpret_cast<const float*>(buffer));
  }
}

// Asks for rows that will be read soon. Hardware follows one stream, not 16 rows at once.
inline void prefetch_rows(const Rows& x, int64_t first_row, int64_t num_rows, int64_t columns) {
  if (x.column_stride != 1) return;  // rows apart in memory; of one column, the stride may be any number
  const int64_t bytes = numbers_bytes(x.dtype, columns);
  for (int64_t r = first_row; r < first_row + num_rows; ++r) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(x.row(r) + at, 0, 2);
  }
}

inline int64_t words_of(int64_t elements, int elements_per_word) {
  return (elements + elements_per_word - 1) / elements_per_word;
}

// Whether rows are words as they lie, so that whole vectors of them can be loaded.
template <class Mac>
inline bool plain_words(const Rows& x) {
  return x.dtype == (Mac::kElements == 1 ? DType::kFloat32 : DType::kBFloat16) && x.column_stride == 1;
}

// Words of a row in a copy, which behind the last element are 0.
template <class Mac>
inline int64_t row_words(int64_t columns) {
  return words_of(whole(columns, kDimStep), Mac::kElements);
}

// out[word][lane] = word of row `lane`; lanes from `num_rows` on are 0. As many as parts of a tile that have a row, whole
// vectors; kTile apart. No rows that lie apart.
template <class Mac>
void transpose_rows(float* out, const Rows& x, int64_t num_rows, int64_t columns) {
  const int64_t words = words_of(columns, Mac::kElements);
  const int64_t whole_words = plain_words<Mac>(x) ? columns / Mac::kElements : 0;
  for (int lane = 0; lane < num_rows; lane += kLanes) {
    for (int64_t word = 0; word < words; word += kLanes) {
      F square[kLanes];
      if (word + kLanes <= whole_words) {
        const char* const first = x.data + lane * x.row_bytes;
        const int64_t rows = num_rows - lane;
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) {
          square[r] = r < rows ? load(f32(first + r * x.row_bytes) + word) : broadcast(0.0f);
        }
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(out + (word + i) * kTile + lane, square[i]);
        continue;
      }
      const int n = words - word < kLanes ? static_cast<int>(words - word) : kLanes;
      for (int r = 0; r < kLanes; ++r) {
        square[r] = lane + r < num_rows ? load_words<Mac>(x, lane + r, word, n, columns) : broadcast(0.0f);
      }
      transpose(square);
      for (int i = 0; i < n; ++i) store(out + (word + i) * kTile + lane, square[i]);
    }
  }
  for (int64_t lane = whole(num_rows, kLanes); lane < whole(num_rows, kPartLanes); lane += kLanes) {
    for (int64_t word = 0; word < words; ++word) store(out + word * kTile + lane, broadcast(0.0f));
  }
  for (int64_t i = words * kTile; i < row_words<Mac>(columns) * kTile; i += kLanes) store(out + i, broadcast(0.0f));
}

// out[row][word], rows from num_rows to padded_rows 0.
template <class Mac>
void copy_rows(float* out, const Rows& x, int64_t first_row, int64_t num_rows, int64_t padded_rows, int64_t columns) {
  const int64_t words = words_of(columns, Mac::kElements), padded_words = row_words<Mac>(columns);
  const int64_t whole_words = plain_words<Mac>(x) ? columns / Mac::kElements : 0;
  const auto vector_of = [](int64_t n) { return n < kLanes ? static_cast<int>(n) : kLanes; };
  for (int64_t r = 0; r < padded_rows; ++r, out += padded_words) {
    int64_t word = 0;
    for (; r < num_rows && word + kLanes <= whole_words; word += kLanes) {
      store(out + word, load(f32(x.row(first_row + r)) + word));
    }
    if (Mac::kElements == 1 && r < num_rows && whole_words == 0) {
      word = copy_scaled_columns(out, x, first_row + r, columns);
    }
    for (; word < padded_words; word += kLanes) {
      F x_r = broadcast(0.0f);
      if (r < num_rows && word < words) {
        x_r = load_words<Mac>(x, first_row + r, word, vector_of(words - word), columns);
      }
      store_first(out + word, x_r, vector_of(padded_words - word));
    }
  }
}

inline F finite_or_zero(F x) { return select(equal(x - x, broadcast(0.0f)), x, broadcast(0.0f)); }

// A word of each of n columns from column on, along the rows: of row `row`, and for a pair of the next, rows from num_rows on
// being 0. With `finite`, NaN and inf become 0.
template <class Mac>
inline F load_along(const Rows& x, int64_t first_row, int64_t row, int64_t num_rows, int64_t column, int n,
                    bool finite) {
  const auto load_row = [&](int64_t r) {
    const F x_r = r < num_rows ? load_columns(x, first_row + r, column, n) : broadcast(0.0f);
    return finite ? finite_or_zero(x_r) : x_r;
  };
#ifdef POLYHEAD_HAS_BF16_DOT
  if constexpr (Mac::kElements == 2) return pair_bf16(load_row(row), load_row(row + 1));
#endif
  return load_row(row);
}

// Rows as words along the rows: out[row / kElements][d], columns from `dim` to `out_stride` 0. With `finite`, NaN and inf
// become 0.
template <class Mac>
void copy_values(float* out, int64_t out_stride, const Rows& x, int64_t first_row, int64_t num_rows,
                 int64_t padded_rows, int64_t dim, bool finite) {
  if (Mac::kElements == 1 && !finite && plain_words<Mac>(x) && dim % kLanes == 0 && num_rows == padded_rows) {
    for (int64_t i = 0; i < num_rows; ++i, out += out_stride) {
      const float* row = f32(x.row(first_row + i));
      for (int64_t d = 0; d < dim; d += kLanes) store(out + d, load(row + d));
    }
    return;
  }
  for (int64_t r = 0; r < padded_rows; r += Mac::kElements) {
    int64_t d = 0;
    if (Mac::kElements == 1 && !finite && r < num_rows) {
      d = copy_scaled_columns(out + r * out_stride, x, first_row + r, dim);
    }
    for (; d < dim; d += kLanes) {
      const int n = dim - d < kLanes ? static_cast<int>(dim - d) : kLanes;
      store_first(out + (r / Mac::kElements) * out_stride + d, load_along<Mac>(x, first_row, r, num_rows, d, n, finite),
                  out_stride - d < kLanes ? static_cast<int>(out_stride - d) : kLanes);
    }
  }
}

// Copying costs 1 to 2 % of a task of several tiles. Reading in place needs words of the right type, and rows that are not a
// multiple of 1 KiB apart (512 bytes of pairs): those fall into few sets of the L1 cache ([B, S, H, D] with 16 heads of 64
// has such rows).
template <class Mac>
bool readable_in_place(const Rows& x, int64_t columns) {
  constexpr int64_t kElementBytes = kWordBytes / Mac::kElements;
#ifdef POLYHEAD_HAS_TMM  // a register is read line by line, and from rows across lines, as numpy's may lie, twice as slowly
  if (reinterpret_cast<uintptr_t>(x.data) % 64 != 0 || x.row_bytes % 64 != 0) return false;
#endif
  return plain_words<Mac>(x) && x.apart == nullptr && columns % Mac::kElements == 0 && columns % kDimStep == 0 &&
         x.row_bytes % kWordBytes == 0 &&
         (x.row_bytes == columns * kElementBytes || x.row_bytes % (256 * kElementBytes) != 0);
}

inline Words words_in_place(const Rows& x, int64_t first_row) {
  return {reinterpret_cast<const Word*>(x.row(first_row)), static_cast<ptrdiff_t>(x.row_bytes / kWordBytes)};
}

// Rows as words along the columns. Rows from num_rows to padded_rows are 0.
template <class Mac>
Words rows_as_words(float* copy, const Rows& x, int64_t first_row, int64_t num_rows, int64_t padded_rows,
                    int64_t columns) {
  if (num_rows == padded_rows && readable_in_place<Mac>(x, columns)) {
    return words_in_place(x, first_row);
  }
  copy_rows<Mac>(copy, x, first_row, num_rows, padded_rows, columns);
  return {copy, static_cast<ptrdiff_t>(row_words<Mac>(columns))};
}

#ifdef POLYHEAD_HAS_TMM
// Word `word` of row d of an operand A of registers tmm that was copied, `words` a row: register after register, in the order in
// which products take them, for the nearest cache is filled faster by lines that follow each other. Two registers of 16 rows share
// what they are multiplied by:
// [d / 32][word / 16][plane][d / 16 % 2][d % 16][word % 16], where the least of several planes lies first.
constexpr int64_t kRegisterPair = 2 * 16 * 16;
template <class Mac>
inline int64_t in_registers(int64_t d, int64_t word, int64_t words, int plane = 0) {
  constexpr int64_t kStep = Mac::kPlanes * kRegisterPair;
  return d / 32 * (words / 16) * kStep + word / 16 * kStep + (Mac::kPlanes - 1 - plane) * kRegisterPair + d % 32 * 16 +
         word % 16;
}

// The same transposed, as an operand A of registers tmm: of rows d words along the rows, whole registers.
inline void copy_transposed(float* out, const Rows& x, int64_t first_row, int64_t num_rows, int64_t padded_rows,
                            int64_t dim, bool finite) {
  const bool plain = plain_words<BFloat16Pair>(x) && !finite;
  const int64_t words = padded_rows / 2;
  for (int64_t word = 0; word < words; word += kLanes) {
    for (int64_t d = 0; d < whole(dim, kDimStep); d += kLanes) {
      F square[kLanes];
      if (plain && 2 * (word + kLanes) <= num_rows && d + kLanes <= dim) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          const int64_t row = first_row + 2 * (word + i);
          square[i] = join_bf16(load_bf16(u16(x.row(row) + 2 * d)), load_bf16(u16(x.row(row + 1) + 2 * d)));
        }
      } else {
        const int n = dim - d < kLanes ? static_cast<int>(dim - d) : kLanes;
        for (int i = 0; i < kLanes; ++i) {
          square[i] =
              n > 0 ? load_along<BFloat16Pair>(x, first_row, 2 * (word + i), num_rows, d, n, finite) : broadcast(0.0f);
        }
      }
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(out + in_registers<BFloat16Pair>(d + i, word, words), square[i]);
    }
  }
}
#endif

// Rows as words along the rows, as copy_values writes them, or copy_transposed.
template <class Mac>
Words values_as_words(float* copy, const Rows& x, int64_t first_row, int64_t num_rows, int64_t padded_rows,
                      int64_t columns, bool finite) {
#ifdef POLYHEAD_HAS_TMM
  copy_transposed(copy, x, first_row, num_rows, padded_rows, columns, finite);
  return {copy, static_cast<ptrdiff_t>(padded_rows / 2 * kDimStep), kPanel, kRegisterPair};
#else
  if (Mac::kElements == 1 && num_rows == padded_rows && !finite && readable_in_place<Mac>(x, columns)) {
    return words_in_place(x, first_row);
  }
  copy_values<Mac>(copy, columns, x, first_row, num_rows, padded_rows, columns, finite);
  return {copy, columns};
#endif
}

// Rows as words along the rows, in panels of `panel` columns: out[column / panel][row / kElements][panel].
template <class Mac>
void copy_panels(float* out, int64_t panel_stride, int panel, const Rows& x, int64_t first_row, int64_t num_rows,
                 int64_t padded_rows, int64_t columns, bool finite) {
  for (int64_t c = 0; c < columns; c += panel, out += panel_stride) {
    copy_values<Mac>(out, panel, x.from(0, c), first_row, num_rows, padded_rows,
                     columns - c < panel ? columns - c : panel, finite);
  }
}

#ifdef POLYHEAD_HAS_BF16_DOT
// How many columns of bfloat16 turn_pairs writes: a whole line, where rows of one vector would be half a line each.
constexpr int kTurnedColumns = 2 * kLanes;

// Columns of `rows` rows of bfloat16, row_stride elements apart, from vectors that hold a column each: column(i).
template <class Column>
inline __attribute__((always_inline)) void turn_pairs(uint16_t* to, int64_t row_stride, int rows,
                                                      const Column& column) {
  F words[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) words[i] = pair_bf16(column(2 * i), column(2 * i + 1));
  transpose(words);
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) {
    if (r < rows) store(reinterpret_cast<float*>(to + r * row_stride), words[r]);
  }
}
#endif

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

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
