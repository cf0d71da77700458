// Few rows of A against B as it lies, over all of K: B is read once, in the order in which it lies, so packing it would cost
// more than the product. The order of sums is that of gemm_tile.h. Where columns of B are contiguous (torch's weights), squares
// of them are transposed in registers. Measured on a Xeon (family 6 model 207, 2026-11-26, one thread, ms), before, when
// rows of B were followed a chunk of K at a time and more than 4 rows of A packed it, and now (float32, 1024 x 1024, which L3
// holds and is read in 0.135): rows contiguous, M = 1 0.155 and 0.132, 4 0.199 and 0.139, 8 0.45 and 0.20; columns
// contiguous, M = 1 0.199 and 0.139, 3 0.235 and 0.147, 8 0.36 and 0.19, 12 0.41 and 0.22; 32 columns at a time instead of 16
// 0.148. 4096 x 4096, from memory: 4.1 and 2.9 (rows), 3.6 and 2.8. bfloat16 as floats, M = 1: 0.30 and 0.049, 0.28 and 0.11.
#pragma once

#include "cpu/isa/isa.h"
#include "cpu/linear/gemm_pack.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Rows that stream: more take longer than B takes to be read.
constexpr int kStreamRows = kRegisters == 32 ? 12 : 4, kStreamTile = kStreamRows;

// As many, of which there is a loop: rows of 0 follow.
constexpr int stream_rows(int rows) { return rows <= 2 ? rows : rows <= 4 ? 4 : rows <= 8 ? 8 : 12; }

// Where the sums of a column go: panels panel_stride apart, in them rows row_stride apart.
struct StreamSums {
  float* data;
  int64_t panel_stride;
  ptrdiff_t row_stride;

  float* at(int row, int64_t column) const {
    return data + column / kColumns * panel_stride + row * row_stride + column % kColumns;
  }
};

// The rows of A, packed a chunk of terms after the other: [chunk][stream_rows(num_rows)][kRowStride].
struct StreamedRows {
  const float* a;
  int num_rows;
  int64_t first_k, num_k;
};

// Sums over a chunk that stand in the L1 cache, of columns of B side by side, and rows of B that are read beside each other.
constexpr int64_t kStreamSums = 8192;
constexpr int64_t stream_block(int rows) { return kStreamSums / rows / kColumns * kColumns; }
constexpr int stream_terms_of(int rows) { return rows <= (kRegisters == 32 ? 4 : 2) ? 4 : 2; }

// Adds kTerms words of each of `columns` columns to the sums over a chunk, [row][stream_block], which are begun with the
// `first`; with the `last` they go to `to`, onto those of the chunks before (`add`).
template <class Mac, DType kDType, int kRows, int kTerms>
void stream_terms(const StreamSums& to, int64_t to_column, float* sums, int num_rows, const float* a, const Matrix& b,
                  int64_t column, int64_t columns, int64_t k, int64_t end_k, bool first, bool last, bool add) {
  constexpr int64_t kBlock = stream_block(kRows);
  using Stored = StoredWord<Mac, kDType>;
  F a_t[kRows][kTerms];
  const char *even[kTerms], *odd[kTerms];
  const auto row = [&](int64_t k_t) {
    return static_cast<const char*>(b.data) + (offset_of(b.rows, k_t) + column) * Stored::kElementBytes;
  };
#pragma GCC unroll 4
  for (int t = 0; t < kTerms; ++t) {
    const int64_t k_t = k + t * Mac::kElements;
    even[t] = row(k_t);
    odd[t] = Mac::kElements == 2 && k_t + 1 < end_k ? row(k_t + 1) : nullptr;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) a_t[r][t] = broadcast(a[r * kRowStride + t]);
  }
  for (int64_t c = 0; c < columns; c += kLanes) {
    F b_t[kTerms];
#pragma GCC unroll 4
    for (int t = 0; t < kTerms; ++t) {
      const int64_t at = c * Stored::kElementBytes;
      b_t[t] = Stored::across(even[t] + at, odd[t] == nullptr ? nullptr : odd[t] + at);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      F acc = first ? broadcast(0.0f) : load(sums + r * kBlock + c);
#pragma GCC unroll 4
      for (int t = 0; t < kTerms; ++t) acc = Mac::step(acc, b_t[t], a_t[r][t]);
      if (!last) {
        store(sums + r * kBlock + c, acc);
      } else if (r < num_rows) {
        float* const whole = to.at(r, to_column + c);
        store(whole, add ? acc + load(whole) : acc);
      }
    }
  }
}

// Columns [column, column + num) of B, whose rows are contiguous.
template <class Mac, DType kDType, int kRows>
void stream_across(const StreamSums& to, const StreamedRows& rows, const Matrix& b, int64_t column, int64_t num,
                   float* sums) {
  const int64_t end_k = rows.first_k + rows.num_k;
  constexpr int64_t kBlock = stream_block(kRows);
  constexpr int kTerms = stream_terms_of(kRows);
  for (int64_t done = 0; done < num; done += kBlock) {
    const int64_t columns = num - done < kBlock ? num - done : kBlock;
    const float* a = rows.a;
    for (int64_t k = rows.first_k; k < end_k; k += kChunkWords * Mac::kElements, a += kRows * kRowStride) {
      const int64_t left = words_of(end_k - k, Mac::kElements), words = left < kChunkWords ? left : kChunkWords;
      const bool add = k > rows.first_k;
      const auto terms = [&]<int kTerms_>(int64_t word) {
        stream_terms<Mac, kDType, kRows, kTerms_>(to, done, sums, rows.num_rows, a + word, b, column + done, columns,
                                                  k + word * Mac::kElements, end_k, word == 0, word + kTerms_ == words,
                                                  add);
      };
      int64_t word = 0;
      for (; word + kTerms <= words; word += kTerms) terms.template operator()<kTerms>(word);
      for (; word < words; ++word) terms.template operator()<1>(word);
    }
  }
}

// Adds a word of kLanes columns, times that of A.
template <class Mac, int kRows>
inline __attribute__((always_inline)) void add_word(F (&acc)[kRows], F b, const float* a) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) acc[r] = Mac::step(acc[r], b, broadcast(a[r * kRowStride]));
}

// Words [word, word + num), num < kLanes, of kLanes columns of B from `column` on, of elements below end_k.
template <class Mac>
__attribute__((noinline)) void load_last_words(F (&square)[kLanes], const Matrix& b, int64_t column, int64_t word,
                                               int64_t num, int64_t end_k) {
  for (int i = 0; i < kLanes; ++i) {
    square[i] = load_line_words<Mac>(column_of(b, column + i), word, static_cast<int>(num), end_k);
  }
  transpose(square);
}

// Which words of rows that are read beside each other are asked for: Intel's cores follow 16 rows by themselves, and asking takes
// a tenth of the speed, or a quarter if it is for words far ahead; but near ones come 1.1 to 1.15 times as fast from memory (Xeon,
// family 6 model 207).
enum class AskedWords { kNone, kNear, kFar };
constexpr int64_t kNearWords = 4 * kLanes, kFarWords = 8 * kLanes;

inline AskedWords asked_words(const Matrix& b) {
  constexpr int64_t kInCaches = 8 << 20;  // elements
  if (!by_intel()) return AskedWords::kFar;
  return b.rows.size() * b.columns.size() > kInCaches ? AskedWords::kNear : AskedWords::kNone;
}

// kLanes columns of B from `column` on, which are contiguous. `more`: as many follow.
template <class Mac, DType kDType, int kRows>
void stream_along(const StreamSums& to, int64_t to_column, const StreamedRows& rows, const Matrix& b, int64_t column,
                  AskedWords asked, bool more) {
  using Stored = StoredWord<Mac, kDType>;
  const char* source[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const int64_t first = offset_of(b.columns, column + i) + rows.first_k;
    source[i] = static_cast<const char*>(b.data) + first * Stored::kElementBytes;
  }
  const int64_t end_k = rows.first_k + rows.num_k, whole = rows.num_k / Mac::kElements / kLanes * kLanes;
  const int64_t words = words_of(rows.num_k, Mac::kElements);
  const ptrdiff_t next =
      more ? (offset_of(b.columns, column + kLanes) - offset_of(b.columns, column)) / Mac::kElements + kFarWords - whole
           : 0;
  F total[kRows];
  for (int64_t begin = 0; begin < words; begin += kChunkWords) {
    const float* const a = rows.a + begin / kChunkWords * kRows * kRowStride;
    const int64_t end = words - begin < kChunkWords ? words : begin + kChunkWords,
                  end_whole = end < whole ? end : whole;
    F acc[kRows], square[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) acc[r] = broadcast(0.0f);
    int64_t word = begin;
    for (; word < end_whole; word += kLanes) {
      if (asked == AskedWords::kFar) {
        const int64_t ahead = word + (word + kFarWords < whole ? kFarWords : next);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) __builtin_prefetch(source[i] + ahead * Stored::kBytes, 0, 2);
      } else if (asked == AskedWords::kNear) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) __builtin_prefetch(source[i] + (word + kNearWords) * Stored::kBytes, 0, 3);
      }
      Stored::load(square, source, word * Stored::kBytes);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) add_word<Mac>(acc, square[i], a + word - begin + i);
    }
    if (word < end) {
      load_last_words<Mac>(square, b, column, rows.first_k / Mac::kElements + word, end - word, end_k);
      for (; word < end; ++word) add_word<Mac>(acc, square[word - end_whole], a + word - begin);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) total[r] = begin == 0 ? acc[r] : acc[r] + total[r];
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    if (r < rows.num_rows) store(to.at(r, to_column), total[r]);
  }
}

// Whether so many rows of A may stream, and do so against B.
inline bool may_stream(int64_t rows, int64_t /*k*/) { return rows <= kStreamRows; }
inline bool streams(int64_t /*rows*/, const Matrix& b) { return contiguous(b.columns) || contiguous(b.rows); }

// Whole panels of the columns [column, column + num); returns how many columns. `to` counts from `column` on, `sums` is
// memory for kStreamSums floats.
template <class Mac, DType kDType, int kRows>
int64_t stream_columns(const StreamSums& to, const StreamedRows& rows, const Matrix& b, int64_t column, int64_t num,
                       float* sums) {
  num = num / kColumns * kColumns;
  if (contiguous(b.columns)) {
    stream_across<Mac, kDType, kRows>(to, rows, b, column, num, sums);
  } else {
    const AskedWords asked = asked_words(b);
    for (int64_t c = 0; c < num; c += kLanes) {
      stream_along<Mac, kDType, kRows>(to, c, rows, b, column + c, asked, c + kLanes < num);
    }
  }
  return num;
}

template <class Mac, DType kDType>
int64_t stream_columns(const StreamSums& to, const StreamedRows& rows, const Matrix& b, int64_t column, int64_t num,
                       float* sums) {
  constexpr int kEight = kStreamRows < 8 ? kStreamRows : 8;
  switch (stream_rows(rows.num_rows)) {
    case 1: return stream_columns<Mac, kDType, 1>(to, rows, b, column, num, sums);
    case 2: return stream_columns<Mac, kDType, 2>(to, rows, b, column, num, sums);
    case 4: return stream_columns<Mac, kDType, 4>(to, rows, b, column, num, sums);
    case 8: return stream_columns<Mac, kDType, kEight>(to, rows, b, column, num, sums);
    default: return stream_columns<Mac, kDType, kStreamRows>(to, rows, b, column, num, sums);
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
