// gemm_stream.h where there are registers of 16 x 16 words: few rows of A against B as it lies, without packing it.
//
// Where columns of B are contiguous (torch's weights), C^T = B^T A^T: a register takes 16 of them from where they lie, and A is
// packed turned. Where rows of B are, pairs of rows are interleaved step by step, in L1. The order of sums is that of gemm_tmm.h.
// Measured on a Xeon (family 6 model 167, 2026-11-28, bfloat16, one thread, us), when panels of B were packed, by the vectors of
// cpu_avx512, and now: columns contiguous, [M, 512] x [512, 512] of M = 1 25, 22 and 8.9, 8 26, 43 and 9.5, 16 26, 75 and 9.9, 32
// 30, 120 and 13, 64 41, 230 and 28; [M, 1024] x [1024, 1024] of M = 1 120, 97 and 48, 16 128, 320 and 57, 96 272, - and 213, 128 301
// and 280, 192 382 and 407. Rows contiguous, the same of M = 1 39, 8 and 10, 8 39, 40 and 12, 16 42, 95 and 13; 175, 46 and 57, 175,
// 166 and 60, 185, 400 and 64; of M = 48 (packing has become faster, too) 186 and 187.
#pragma once

#include "cpu/linear/gemm_tmm.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Rows that stream against contiguous columns, and against contiguous rows: for more, packing B is the faster way.
constexpr int kStreamRows = 3 * kTileRows, kStreamRowsAcross = 2 * kTmmRows;
constexpr int kStreamTile = kTileRows;
constexpr int kStepTerms = 2 * kTmmRows, kChunkTerms = 2 * static_cast<int>(kChunkWords);

inline bool streams_along(const Matrix& b) {
  return contiguous(b.rows) && one_dim(b.columns) && b.columns.strides[2] % 2 == 0;
}
inline bool streams_across(const Matrix& b) { return contiguous(b.columns) && one_dim(b.rows); }

// Whether `rows` of A stream against B.
inline bool streams(int64_t rows, const Matrix& b) {
  return (rows <= kStreamRows && streams_along(b)) || (rows <= kStreamRowsAcross && streams_across(b));
}

// Terms of a task, which begin with a chunk.
struct Terms {
  int64_t first, num;

  int of_chunk(int64_t begin) const { return static_cast<int>(num - begin < kChunkTerms ? num - begin : kChunkTerms); }
};

// --- columns of B are contiguous ---

inline int64_t turned_words(const Terms& terms) { return whole(words_of(terms.num, 2), kTmmRows); }

// A turned: [tile][word][kColumns rows], 0 behind the last row and word.
template <class Mac>
void pack_turned_rows(float* out, const Matrix& a, int64_t first_row, int num_rows, const Terms& terms) {
  const int64_t end = terms.first + terms.num, words = turned_words(terms);
  for (int r = 0; r < whole(num_rows, kTmmRows); r += kLanes) {
    float* const to = out + r / kTileRows * words * kColumns + r % kTileRows;
    Line rows[kLanes];
    for (int i = 0; i < kLanes && r + i < num_rows; ++i) rows[i] = row_of(a, first_row + r + i);
    for (int64_t word = 0; word < words; word += kLanes) {
      const int64_t left = words_of(terms.num, 2) - word;
      F square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const bool some = r + i < num_rows && left > 0;
        const int n = left < kLanes ? static_cast<int>(left) : kLanes;
        square[i] = some ? load_line_words<Mac>(rows[i], terms.first / 2 + word, n, end) : broadcast(0.0f);
      }
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(to + (word + i) * kColumns, square[i]);
    }
  }
}

// Sums of kGroups x 16 columns of B times kHalves x 16 rows of A, over 16 words. b: the columns' words, `stride` words apart.
template <int kGroups, int kHalves, int kGroup_ = 0>
inline __attribute__((always_inline)) void multiply_columns(const char* b, ptrdiff_t stride, const float* a) {
  constexpr int kOfB = 4 + kGroup_ % 2, kSum = kGroup_ * kHalves;
  if constexpr (kGroup_ == 0) {
    tmm_load<6>(a, kColumns);
    if constexpr (kHalves == 2) tmm_load<7>(a + kTmmRows, kColumns);
  }
  tmm_load<kOfB>(b, stride);
  tmm_dot_bf16<kSum, kOfB, 6>();
  if constexpr (kHalves == 2) tmm_dot_bf16<kSum + 1, kOfB, 7>();
  if constexpr (kGroup_ + 1 < kGroups) {
    multiply_columns<kGroups, kHalves, kGroup_ + 1>(b + 4 * kTmmRows * stride, stride, a);
  }
}

template <int kGroups, int kHalves, int kSum = 0>
inline __attribute__((always_inline)) void store_columns(float* sums) {
  constexpr int kRows = kHalves * kTmmRows;
  tmm_store<kSum>(sums + kSum / kHalves * kTmmRows * kRows + kSum % kHalves * kTmmRows, kRows);
  if constexpr (kSum + 1 < kGroups * kHalves) store_columns<kGroups, kHalves, kSum + 1>(sums);
}

// [column][row of A]: the sums over all terms of kGroups x 16 columns from `column` on.
template <class Mac, int kGroups, int kHalves>
void sum_columns(float* sums, const Matrix& b, int64_t column, const float* a, const Terms& terms) {
  constexpr int kRows = kHalves * kTmmRows, kNumColumns = kGroups * kTmmRows;
  const int64_t end = terms.first + terms.num;
  const ptrdiff_t stride = b.columns.strides[2] / 2;
  const char* from = static_cast<const char*>(b.data) + 2 * (offset_of(b.columns, column) + terms.first);
  for (int64_t begin = 0; begin < terms.num; begin += kChunkTerms, a += kChunkWords * kColumns) {
    const int num = terms.of_chunk(begin), num_whole = num / kStepTerms * kStepTerms;
    clear_sums<2>();
    for (int term = 0; term < num_whole; term += kStepTerms, from += 2 * kStepTerms) {
      multiply_columns<kGroups, kHalves>(from, stride, a + term / 2 * kColumns);
    }
    if (num_whole < num) {
      alignas(64) float last[kNumColumns * kTmmRows] = {};
      for (int c = 0; c < kNumColumns; ++c) {
        const Line line = column_of(b, column + c);
        for (int word = 0; 2 * word < num - num_whole; word += kLanes) {
          const int words = (num - num_whole + 1) / 2 - word;
          store(last + c * kTmmRows + word, load_line_words<Mac>(line, (terms.first + begin + num_whole) / 2 + word,
                                                                 words < kLanes ? words : kLanes, end));
        }
      }
      multiply_columns<kGroups, kHalves>(reinterpret_cast<const char*>(last), kTmmRows, a + num_whole / 2 * kColumns);
    }
    if (begin == 0) {
      store_columns<kGroups, kHalves>(sums);
      continue;
    }
    alignas(64) float of_chunk[kNumColumns * kRows];
    store_columns<kGroups, kHalves>(of_chunk);
    for (int i = 0; i < kNumColumns * kRows; i += kLanes) store(sums + i, load(of_chunk + i) + load(sums + i));
  }
}

// A panel of sums [column][kRows rows of A] as [row][column].
template <int kRows>
void turn(float* out, const float* sums) {
  for (int r = 0; r < kRows; r += kLanes) {
    for (int c = 0; c < kColumns; c += kLanes) {
      F square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = load(sums + (c + i) * kRows + r);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(out + (r + i) * kColumns + c, square[i]);
    }
  }
}

// Of `num_rows` rows and `num` columns, whole panels, from `column` on; put(row, panel, sums, false, true) takes those of a tile and
// a panel, [row][kColumns].
template <class Mac, class Put>
void stream_along(const Matrix& b, int64_t column, int64_t num, const float* a, int num_rows, const Terms& terms,
                  const Put& put) {
  constexpr int kTwoPanels = 2 * kColumns;
  alignas(64) float sums[kTwoPanels * kTmmRows], rows[kTileRows * kColumns];
  static_assert(kTwoPanels * kTmmRows == kColumns * kTileRows);
  int64_t done = 0;
  if (num_rows <= kTmmRows) {
    for (; done + kTwoPanels <= num; done += kTwoPanels) {
      sum_columns<Mac, 4, 1>(sums, b, column + done, a, terms);
      for (int c = 0; c < kTwoPanels; c += kColumns) {
        turn<kTmmRows>(rows, sums + c * kTmmRows);
        put(0, done + c, rows, false, true);
      }
    }
  }
  const int64_t tile_floats = turned_words(terms) * kColumns;
  for (; done < num; done += kColumns) {
    for (int row = 0; row < num_rows; row += kTileRows) {
      const float* const a_tile = a + row / kTileRows * tile_floats;
      if (num_rows - row <= kTmmRows) {
        sum_columns<Mac, 2, 1>(sums, b, column + done, a_tile, terms);
        turn<kTmmRows>(rows, sums);
      } else {
        sum_columns<Mac, 2, 2>(sums, b, column + done, a_tile, terms);
        turn<kTileRows>(rows, sums);
      }
      put(row, done, rows, false, true);
    }
  }
}

// --- rows of B are contiguous ---

// A as it lies, [chunk][row][kRowStride], whole registers of rows.
template <class Mac>
void pack_chunks(float* out, const Matrix& a, int64_t first_row, int num_rows, const Terms& terms) {
  for (int64_t begin = 0; begin < terms.num; begin += kChunkTerms, out += whole(num_rows, kTmmRows) * kRowStride) {
    pack_along<Mac>(out, a, first_row, num_rows, terms.first + begin, terms.of_chunk(begin));
  }
}

// Rows of B ahead that are asked for: of more, lines of a power of two of bytes apart would put each other out of L1.
constexpr int kRowsAsked = 8;

// kStepTerms rows of B, from `rows` on, as words of kColumns_ columns; the terms behind `num` are 0.
template <int kColumns_>
inline __attribute__((always_inline)) void interleave(float* out, const char* rows, ptrdiff_t row_bytes, int num) {
  alignas(64) static constexpr uint16_t kNothing[kColumns_] = {};
  for (int term = 0; term < kStepTerms; term += 2, out += kColumns_, rows += 2 * row_bytes) {
    const uint16_t* const even = term < num ? u16(rows) : kNothing;
    const uint16_t* const odd = term + 1 < num ? u16(rows + row_bytes) : kNothing;
#pragma GCC unroll 4
    for (int c = 0; c < kColumns_; c += 2 * kLanes) {
      F words[2];
      __builtin_prefetch(rows + kRowsAsked * row_bytes + 2 * c);
      __builtin_prefetch(rows + (kRowsAsked + 1) * row_bytes + 2 * c);
      interleave_bf16(words, even + c, odd + c);
      store(out + c, words[0]);
      store(out + c + kLanes, words[1]);
    }
  }
}

// Sums of 16 rows of A times kGroups x 16 columns of B over 16 words.
template <int kGroups, int kGroup_ = 0>
inline __attribute__((always_inline)) void multiply_rows(const float* a, const float* b) {
  if constexpr (kGroup_ == 0) tmm_load<6>(a, kRowStride);
  tmm_load<4 + kGroup_ % 2>(b, kGroups * kTmmRows);
  tmm_dot_bf16<kGroup_, 6, 4 + kGroup_ % 2>();
  if constexpr (kGroup_ + 1 < kGroups) multiply_rows<kGroups, kGroup_ + 1>(a, b + kTmmRows);
}

// [panel][row][kColumns]
template <int kGroups, int kGroup_ = 0>
inline __attribute__((always_inline)) void store_rows(float* sums) {
  tmm_store<kGroup_>(sums + kGroup_ / 2 * kTmmRows * kColumns + kGroup_ % 2 * kTmmRows, kColumns);
  if constexpr (kGroup_ + 1 < kGroups) store_rows<kGroups, kGroup_ + 1>(sums);
}

// The sums over a chunk of `num` terms of kGroups x 16 columns, whose first row is at b.
template <int kGroups>
void sum_rows(float* sums, const char* b, ptrdiff_t row_bytes, const float* a, int num) {
  constexpr int kNumColumns = kGroups * kTmmRows;
  alignas(64) float words[2][kTmmRows * kNumColumns];  // of a step, while those of the step before are multiplied
  clear_sums<2>();
  int turn = 0;
  for (int term = 0; term < num; term += kStepTerms, turn ^= 1, b += kStepTerms * row_bytes) {
    interleave<kNumColumns>(words[turn], b, row_bytes, num - term);
    if (term > 0) multiply_rows<kGroups>(a + term / 2 - kTmmRows, words[turn ^ 1]);
  }
  multiply_rows<kGroups>(a + (num - 1) / kStepTerms * kTmmRows, words[turn ^ 1]);
  store_rows<kGroups>(sums);
}

// Of `num_rows` rows and `num` columns, whole panels, from `column` on; put(row, panel, sums, first, last) takes those of 16 rows,
// a panel and a chunk. a: [chunk][row][kRowStride], whole registers of rows.
template <class Put>
void stream_across(const Matrix& b, int64_t column, int64_t num, const float* a, int num_rows, const Terms& terms,
                   const Put& put) {
  const ptrdiff_t row_bytes = 2 * b.rows.strides[2];
  const int64_t chunk_floats = whole(num_rows, kTmmRows) * kRowStride;
  const char* const from =
      static_cast<const char*>(b.data) + terms.first * row_bytes + 2 * offset_of(b.columns, column);
  alignas(64) float sums[2 * kTmmRows * kColumns];
  int64_t c = 0;
  const auto sum = [&]<int kGroups>() {
    for (; c + kGroups * kTmmRows <= num; c += kGroups * kTmmRows) {
      for (int64_t begin = 0; begin < terms.num; begin += kChunkTerms) {
        const float* const a_chunk = a + begin / kChunkTerms * chunk_floats;
        for (int row = 0; row < num_rows; row += kTmmRows) {
          sum_rows<kGroups>(sums, from + begin * row_bytes + 2 * c, row_bytes, a_chunk + row * kRowStride,
                            terms.of_chunk(begin));
          for (int panel = 0; panel < kGroups / 2; ++panel) {
            put(row, c + panel * kColumns, sums + panel * kTmmRows * kColumns, begin > 0,
                begin + kChunkTerms >= terms.num);
          }
        }
      }
    }
  };
  sum.template operator()<4>();
  sum.template operator()<2>();
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
