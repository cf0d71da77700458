// gemm_stream.h where there are registers of 16 x 16 words: few rows of A against B as it lies, without packing it, in the order
// of sums of gemm_tmm.h.
//
// Where columns of B are contiguous (torch's weights), C^T = B^T A^T: a register takes 16 of them from where they lie, and A is
// packed turned. Where rows of B are, pairs of rows are interleaved step by step, in L1; for one row of A that gave 0.7 of what
// reading rows of B from end to end gives, so vectors sum as the registers do: over 32 terms the even and the odd ones each by
// themselves, which are added to each other, then to what was there, subnormal numbers as 0.
// docs/kernels.md has what each took on a Xeon (family 6 model 167).
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

// Whether so many rows of A, of `k` terms, may stream: they are packed as a whole, which 2 MiB hold.
inline bool may_stream(int64_t rows, int64_t k) {
  constexpr int64_t kMostElements = int64_t{1} << 20;
  return rows <= kStreamRows && k <= kMostElements / kStreamTile && whole(rows, kStreamTile) * k <= kMostElements;
}

// Whether rows of A that may stream do so against B.
inline bool streams(int64_t rows, const Matrix& b) {
  return streams_along(b) || (rows <= kStreamRowsAcross && streams_across(b));
}

// Terms of a task, which begin with a chunk.
struct Terms {
  int64_t first, num;

  int of_chunk(int64_t begin) const { return static_cast<int>(num - begin < kChunkTerms ? num - begin : kChunkTerms); }
};

// --- columns of B are contiguous ---

inline int64_t turned_words(const Terms& terms) { return whole(words_of(terms.num, 2), kTmmRows); }

// A turned: [tile][word][kColumns rows], 0 behind the last row and word. pack_transposed, which knows whole squares of rows, would be
// 1.05 to 1.2 times as fast for 32 rows, but for up to 8 0.87 to 0.97 (512 x 512).
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

// Columns whose sums stand in L1 beside a step's words.
constexpr int kWideColumns = 128;
// Rows of B ahead that are asked for: of more, lines of a power of two of bytes apart would put each other out of L1.
constexpr int kRowsAsked = 8;

// kStepTerms rows of B, from `rows` on, of `num` columns as [group of 16][word][16]; the terms behind `terms` are 0.
inline void interleave(float* out, const char* rows, ptrdiff_t row_bytes, int terms, int num) {
  alignas(64) static constexpr uint16_t kNothing[2 * kLanes] = {};
  for (int term = 0; term < kStepTerms; term += 2, out += kTmmRows, rows += 2 * row_bytes) {
    const uint16_t *const even = u16(rows), *const odd = u16(rows + row_bytes);
    for (int c = 0; c < num; c += 2 * kLanes) {
      F words[2];
      __builtin_prefetch(rows + kRowsAsked * row_bytes + 2 * c);
      __builtin_prefetch(rows + (kRowsAsked + 1) * row_bytes + 2 * c);
      interleave_bf16(words, term < terms ? even + c : kNothing, term + 1 < terms ? odd + c : kNothing);
      for (int i = 0; i < 2; ++i) {
        const int column = c + i * kLanes;
        store(out + column / kTmmRows * kTmmRows * kTmmRows + column % kTmmRows, words[i]);
      }
    }
  }
}

// sums [panel][16 rows of A][kColumns] of `num` columns += a step's products; `first`: they begin.
template <bool kFirst>
inline void multiply_step(float* sums, const float* a, const float* words, int num) {
  tmm_load<6>(a, kRowStride);
  for (int c = 0; c < num; c += kColumns, sums += kTmmRows * kColumns, words += 2 * kTmmRows * kTmmRows) {
    if constexpr (kFirst) {
      clear_sums<2>();
    } else {
      tmm_load<0>(sums, kColumns);
      tmm_load<1>(sums + kTmmRows, kColumns);
    }
    tmm_load<4>(words, kTmmRows);
    tmm_dot_bf16<0, 6, 4>();
    tmm_load<5>(words + kTmmRows * kTmmRows, kTmmRows);
    tmm_dot_bf16<1, 6, 5>();
    tmm_store<0>(sums, kColumns);
    tmm_store<1>(sums + kTmmRows, kColumns);
  }
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
  alignas(64) float sums[2][kTmmRows * kWideColumns], words[kTmmRows * kWideColumns];
  for (int64_t c = 0; c < num; c += kWideColumns) {
    const int columns = static_cast<int>(num - c < kWideColumns ? num - c : kWideColumns);
    for (int64_t begin = 0; begin < terms.num; begin += kChunkTerms) {
      const float* const a_chunk = a + begin / kChunkTerms * chunk_floats;
      const int terms_of_chunk = terms.of_chunk(begin);
      for (int term = 0; term < terms_of_chunk; term += kStepTerms) {
        interleave(words, from + (begin + term) * row_bytes + 2 * c, row_bytes, terms_of_chunk - term, columns);
        for (int row = 0; row < num_rows; row += kTmmRows) {
          const float* const a_step = a_chunk + row * kRowStride + term / 2;
          float* const to = sums[row / kTmmRows];
          term == 0 ? multiply_step<true>(to, a_step, words, columns)
                    : multiply_step<false>(to, a_step, words, columns);
        }
      }
      for (int row = 0; row < num_rows; row += kTmmRows) {
        for (int panel = 0; panel < columns; panel += kColumns) {
          put(row, c + panel, sums[row / kTmmRows] + panel * kTmmRows, begin > 0, begin + kChunkTerms >= terms.num);
        }
      }
    }
  }
}

// --- rows of B are contiguous, and A is one: vectors, which read rows of B from end to end ---

constexpr int kRowColumns = 2 * kPartColumns;  // of a part at most (gemm_tasks.cc)

// Sums over the even and the odd terms of a step.
struct StepSums {
  alignas(64) float even[kRowColumns], odd[kRowColumns];
};

// Adds kTerms terms of a step, whose first and last may be among them; take(column, evens, odds) takes the sums of the last.
template <int kTerms, class Take>
inline __attribute__((always_inline)) void add_terms(StepSums& sums, const float* a, const uint16_t* b,
                                                     int64_t row_elements, int columns, bool first, bool last,
                                                     const Take& take) {
  for (int c = 0; c < columns; c += kLanes) {
    F even = broadcast(0.0f), odd = broadcast(0.0f);
    if (!first) even = load(sums.even + c), odd = load(sums.odd + c);
#pragma GCC unroll 4
    for (int t = 0; t < kTerms; ++t) {
      F& sum = t % 2 == 0 ? even : odd;
      sum = fma(broadcast(a[t]), load_bf16(b + t * row_elements + c), sum);
    }
    if (last) {
      take(c, even, odd);
    } else {
      store(sums.even + c, even);
      store(sums.odd + c, odd);
    }
  }
}

// The sums over a chunk of `num` terms.
__attribute__((noinline)) void sum_row(float* sums, const float* a, const uint16_t* b, int64_t row_elements, int num,
                                       int columns) {
  StepSums of_step;
  int term = 0;
  const auto add = [&]<int kTerms>() {
    const int end = term + kTerms;
    const auto take = [&](int c, F even, F odd) __attribute__((always_inline)) {
      const F nothing = broadcast(0.0f);
      if (end % kStepTerms != 0)
        even = even + nothing, odd = odd + nothing;  // as registers add terms that are not there
      store(sums + c, (end <= kStepTerms ? nothing : load(sums + c)) + (even + odd));
    };
    add_terms<kTerms>(of_step, a + term, b + term * row_elements, row_elements, columns, term % kStepTerms == 0,
                      end % kStepTerms == 0 || end == num, take);
    term = end;
  };
  while (term + 4 <= num) add.template operator()<4>();
  if (term + 2 <= num) add.template operator()<2>();
  if (term < num) add.template operator()<1>();
}

// As stream_across.
template <class Put>
void stream_row(const Matrix& b, int64_t column, int64_t num, const float* a, const Terms& terms, const Put& put) {
  const int64_t row_elements = b.rows.strides[2];
  const uint16_t* const from = u16(b.data) + terms.first * row_elements + offset_of(b.columns, column);
  alignas(64) float sums[kRowColumns], floats[kChunkTerms];
  for (int64_t c = 0; c < num; c += kRowColumns) {
    const int columns = static_cast<int>(num - c < kRowColumns ? num - c : kRowColumns);
    for (int64_t begin = 0; begin < terms.num; begin += kChunkTerms) {
      const uint16_t* const a_chunk = u16(a + begin / kChunkTerms * kTmmRows * kRowStride);
      for (int term = 0; term < terms.of_chunk(begin); term += kLanes) store(floats + term, load_bf16(a_chunk + term));
      {
        const SubnormalsAsZero as_registers_do;
        sum_row(sums, floats, from + begin * row_elements + c, row_elements, terms.of_chunk(begin), columns);
      }
      for (int panel = 0; panel < columns; panel += kColumns) {
        put(0, c + panel, sums + panel, begin > 0, begin + kChunkTerms >= terms.num);
      }
    }
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
