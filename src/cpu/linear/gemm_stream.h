// Few rows of A against rows of B as they lie: B is read once, so packing it would cost more than the product. Measured
// on Zen 5 (2026-11-21, float32, one thread) at [M, 1024] x [1024, 1024], GB/s of B: M = 1 100, and 33 if packed on the
// way; M = 4 61, and 31. The order of sums is that of gemm_tile.h. Where columns of B are contiguous instead (torch's
// weights), squares of them are transposed in registers: M = 1 50 GB/s, and 36 if packed; M = 3 35, and 26; at 4096 x 4096,
// from memory, M = 1 27, and 16.
#pragma once

#include "cpu/linear/gemm_pack.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kStreamRows = 4;                          // more pay for packing
constexpr int kStreamAlongRows = 3;                     // likewise, where columns of B are contiguous
constexpr int kStreamSums = kRegisters == 32 ? 16 : 8;  // vectors, of all rows together

// Where the sums of a column go: panels panel_stride apart, in them rows row_stride apart.
struct StreamSums {
  float* data;
  int64_t panel_stride;
  ptrdiff_t row_stride;

  float* at(int row, int64_t column) const {
    return data + column / kColumns * panel_stride + row * row_stride + column % kColumns;
  }
};

inline void set_or_add(float* to, F x, bool add) { store(to, add ? x + load(to) : x); }

// Columns [column, column + kVecs_ * kLanes) of B, whose columns are contiguous words or halves of words.
template <class Mac, int kRows, int kVecs_>
void stream_across(const StreamSums& sums, const float* a, const Matrix& b, int64_t column, int64_t sums_column,
                   int64_t first_k, int64_t num_k, bool add) {
  F acc[kRows][kVecs_];
  clear(acc);
  const int64_t words = words_of(num_k, Mac::kElements);
  for (int64_t word = 0; word < words; ++word) {
    const int64_t k = first_k + word * Mac::kElements;
    const Line even = row_of(b, k);
    const Line odd = Mac::kElements == 2 && k + 1 < first_k + num_k ? row_of(b, k + 1) : Line();
    const int64_t later = k + kTermsAhead < first_k + num_k ? k + kTermsAhead : k;
    const char* ahead = static_cast<const char*>(b.data) + (offset_of(b.rows, later) + column) * kBytes<Mac>;
#pragma GCC unroll 16
    for (int v = 0; v < kVecs_; ++v) {
      __builtin_prefetch(ahead + v * kLanes * kBytes<Mac>);
      const F b_v = load_across_plain<Mac>(even, odd, column + v * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[r][v] = Mac::step(acc[r][v], b_v, broadcast(a[r * kRowStride + word]));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVecs_; ++v) set_or_add(sums.at(r, sums_column + v * kLanes), acc[r][v], add);
  }
}

// Words of a column that are asked for before they are read.
constexpr int64_t kColumnWordsAhead = 8 * kLanes;

// Adds `words` words of kLanes columns, times those of A.
template <class Mac, int kRows>
inline void add_words(F (&acc)[kRows][kPanelVecs], int v, const F (&square)[kLanes], const float* a, int words) {
#pragma GCC unroll 16
  for (int i = 0; i < words; ++i) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) acc[r][v] = Mac::step(acc[r][v], square[i], broadcast(a[r * kRowStride + i]));
  }
}

// The same where rows of B are contiguous words. `more`: as many columns follow.
template <class Mac, int kRows>
void stream_along(const StreamSums& sums, const float* a, const Matrix& b, int64_t column, int64_t sums_column,
                  int64_t first_k, int64_t num_k, bool add, bool more) {
  F acc[kRows][kPanelVecs];
  clear(acc);
  const float* source[kColumns];
  const auto word_at = [&](int64_t at) {
    return reinterpret_cast<const float*>(static_cast<const char*>(b.data) + at * kBytes<Mac>);
  };
  for (int c = 0; c < kColumns; ++c) source[c] = word_at(offset_of(b.columns, column + c) + first_k);
  const int64_t words = words_of(num_k, Mac::kElements), whole = num_k / Mac::kElements / kLanes * kLanes;
  const ptrdiff_t next = more ? word_at(offset_of(b.columns, column + kColumns) + first_k) - source[0] : 0;
  int64_t word = 0;
  for (; word < whole; word += kLanes) {
    const int64_t later = word + kColumnWordsAhead;
    const ptrdiff_t ahead = later < words ? later : next + later - words;
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVecs; ++v) {
      F square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        __builtin_prefetch(source[v * kLanes + i] + ahead, 0, 2);
        square[i] = load(source[v * kLanes + i] + word);
      }
      transpose(square);
      add_words<Mac>(acc, v, square, a + word, kLanes);
    }
  }
  if (const int left = static_cast<int>(words - word); left > 0) {
    for (int v = 0; v < kPanelVecs; ++v) {
      F square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const Line line = column_of(b, column + v * kLanes + i);
        square[i] = load_line_words<Mac>(line, first_k / Mac::kElements + word, left, first_k + num_k);
      }
      transpose(square);
      add_words<Mac>(acc, v, square, a + word, left);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVecs; ++v) set_or_add(sums.at(r, sums_column + v * kLanes), acc[r][v], add);
  }
}

// Whether `rows` of A stream against B. Not where registers tmm set the order of sums.
template <class Mac>
inline bool streams(int64_t rows, const Matrix& b) {
  if (kTmm) return false;
  if (plain_axis<Mac>(b, b.columns)) return rows <= kStreamRows;
  return rows <= kStreamAlongRows && plain_axis<Mac>(b, b.rows);
}

// As many of the columns [column, column + num) as whole steps take; returns how many. sums count from `column` on.
template <class Mac, int kRows>
int64_t stream_columns(const StreamSums& sums, const float* a, const Matrix& b, int64_t column, int64_t num,
                       int64_t first_k, int64_t num_k, bool add) {
  if constexpr (kRows <= kStreamAlongRows) {
    if (!plain_axis<Mac>(b, b.columns)) {
      int64_t done = 0;
      for (; done + kColumns <= num; done += kColumns) {
        stream_along<Mac, kRows>(sums, a, b, column + done, done, first_k, num_k, add, done + 2 * kColumns <= num);
      }
      return done;
    }
  }
  constexpr int kVecs_ = kStreamSums / (kRows == 3 ? 4 : kRows);
  static_assert(kVecs_ % kPanelVecs == 0);
  int64_t done = 0;
  for (; done + kVecs_ * kLanes <= num; done += kVecs_ * kLanes) {
    stream_across<Mac, kRows, kVecs_>(sums, a, b, column + done, done, first_k, num_k, add);
  }
  return done;
}

template <class Mac>
int64_t stream_columns(int rows, const StreamSums& sums, const float* a, const Matrix& b, int64_t column, int64_t num,
                       int64_t first_k, int64_t num_k, bool add) {
  switch (rows) {
    case 1: return stream_columns<Mac, 1>(sums, a, b, column, num, first_k, num_k, add);
    case 2: return stream_columns<Mac, 2>(sums, a, b, column, num, first_k, num_k, add);
    case 3: return stream_columns<Mac, 3>(sums, a, b, column, num, first_k, num_k, add);
    default: return stream_columns<Mac, 4>(sums, a, b, column, num, first_k, num_k, add);
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
