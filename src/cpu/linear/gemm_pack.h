// Operands of products as a microkernel reads them: words side by side, from any dtype and strides.
#pragma once

#include "cpu/linear/gemm_tile.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Rows of an operand are asked for before they are read: the hardware follows a row, but not the step to the next.
constexpr int kRowsAhead = 2;    // long ones
constexpr int kTermsAhead = 16;  // short pieces

// How words are read: as they lie, or as floats.
template <class Mac, DType kDType>
struct StoredWord {
  static constexpr int64_t kElementBytes = kDType == DType::kFloat32 ? 4 : 2;
  static constexpr int64_t kBytes = Mac::kElements * kElementBytes;

  static inline F along(const char* p) {
    if constexpr (kBytes == 4) return POLYHEAD_ISA::load(reinterpret_cast<const float*>(p));
    const auto* const half = reinterpret_cast<const uint16_t*>(p);
    return kDType == DType::kFloat16 ? load_f16(half) : load_bf16(half);
  }
  // Of kLanes columns that lie at p[i] + offset, a word in each vector.
  static inline __attribute__((always_inline)) void load(F (&square)[kLanes], const char* const (&p)[kLanes],
                                                         int64_t offset) {
#ifdef POLYHEAD_HAS_LOAD_TRANSPOSED
    if constexpr (kBytes == 4) return load_transposed(square, p, offset);
#endif
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = along(p[i] + offset);
    transpose(square);
  }
  // Of a row, and where words are pairs of the next one; null: there is none.
  static inline F across(const char* even, const char* odd) {
#ifdef POLYHEAD_HAS_BF16_DOT
    if constexpr (Mac::kElements == 2) {
      const F high = odd == nullptr ? broadcast(0.0f) : load_bf16(reinterpret_cast<const uint16_t*>(odd));
      return join_bf16(load_bf16(reinterpret_cast<const uint16_t*>(even)), high);
    }
#endif
    (void)odd;
    return along(even);
  }
};

// Calls work.template operator()<kDType>() for an operand that is multiplied in words of Mac.
template <class Mac, class Work>
inline void with_stored(DType dtype, const Work& work) {
  if (Mac::kElements == 2 || dtype == DType::kBFloat16) return work.template operator()<DType::kBFloat16>();
  if constexpr (Mac::kElements == 1) {
    if (dtype == DType::kFloat32) return work.template operator()<DType::kFloat32>();
    work.template operator()<DType::kFloat16>();
  }
}

// Terms [first_k, first_k + num_k) of rows [first_row, first_row + num_rows) of A: out[row][word], kRowStride apart.
template <class Mac, DType kDType>
void pack_along(float* out, const Matrix& a, int64_t first_row, int64_t num_rows, int64_t first_k, int64_t num_k) {
  using Stored = StoredWord<Mac, kDType>;
  const int64_t first_word = first_k / Mac::kElements, words = words_of(num_k, Mac::kElements);
  const int64_t padded_words = kTmm ? POLYHEAD_ISA::whole(words, 16) : words;
  const int64_t whole = contiguous(a.columns) ? num_k / Mac::kElements / kLanes * kLanes : 0;
  for (int64_t r = 0; r < num_rows; ++r, out += kRowStride) {
    const Line row = row_of(a, first_row + r);
    const char* source = static_cast<const char*>(row.data) + (row.first + first_k) * Stored::kElementBytes;
    const int64_t later = r + kRowsAhead < num_rows ? row_of(a, first_row + r + kRowsAhead).first : row.first;
    const char* ahead = source + (later - row.first) * Stored::kElementBytes;
    int64_t word = 0;
    for (; word < whole; word += kLanes) {
      __builtin_prefetch(ahead + word * Stored::kBytes);
      store(out + word, Stored::along(source + word * Stored::kBytes));
    }
    for (; word < words; word += kLanes) {
      const int n = words - word < kLanes ? static_cast<int>(words - word) : kLanes;
      store_first(out + word, load_line_words<Mac>(row, first_word + word, n, first_k + num_k), kTmm ? kLanes : n);
    }
    for (; word < padded_words; word += kLanes) store(out + word, broadcast(0.0f));
  }
}

template <class Mac>
void pack_along(float* out, const Matrix& a, int64_t first_row, int64_t num_rows, int64_t first_k, int64_t num_k) {
  with_stored<Mac>(a.dtype,
                   [&]<DType kDType>() { pack_along<Mac, kDType>(out, a, first_row, num_rows, first_k, num_k); });
}

// One word of each of `n` lines that lie beside each other: line i is element `at` + i of row k of x, and for a pair of
// row k + 1 too.
template <class Mac>
inline F load_across(const Line& even, const Line& odd, int64_t at, int n) {
  F word = load_line(even, at, n);
#ifdef POLYHEAD_HAS_BF16_DOT
  if constexpr (Mac::kElements == 2) {
    word = join_bf16(word, odd.data == nullptr ? broadcast(0.0f) : load_line(odd, at, n));
  }
#endif
  (void)odd;
  return word;
}

// The same for kLanes lines whose elements lie side by side.
template <class Mac, DType kDType>
inline F load_across_plain(const Line& even, const Line& odd, int64_t at) {
  using Stored = StoredWord<Mac, kDType>;
  const auto place = [at](const Line& x) {
    return static_cast<const char*>(x.data) + (x.first + at) * Stored::kElementBytes;
  };
  return Stored::across(place(even), odd.data == nullptr ? nullptr : place(odd));
}

// Columns [first, first + num) of x, whose rows are the terms: out[column / width][word][column % width], one group of
// `width` columns group_stride after the other. Columns behind the last become 0 up to a whole group; where width is no
// multiple of kLanes, whole vectors are stored, which the next word overwrites.
template <class Mac, DType kDType>
void pack_across_any(float* out, int width, int64_t group_stride, const Matrix& x, int64_t first, int64_t num,
                     int64_t first_k, int64_t num_k) {
  const int64_t words = words_of(num_k, Mac::kElements);
  constexpr int64_t kElementBytes = StoredWord<Mac, kDType>::kElementBytes;
  const bool plain = contiguous(x.columns);
  for (int64_t word = 0; word < words; ++word, out += width) {
    const int64_t k = first_k + word * Mac::kElements;
    const Line even = row_of(x, k);
    const bool pair = Mac::kElements == 2 && k + 1 < first_k + num_k;
    const Line odd = pair ? row_of(x, k + 1) : Line();
    float* group = out;
    const int64_t later = k + kTermsAhead < first_k + num_k ? k + kTermsAhead : k;
    const char* ahead = static_cast<const char*>(x.data) + offset_of(x.rows, later) * kElementBytes;
    const ptrdiff_t odd_ahead = pair ? (odd.first - even.first) * kElementBytes : 0;
    for (int64_t at = 0; at < num; at += width, group += group_stride) {
      for (int lane = 0; lane < width; lane += kLanes) {
        const int64_t left = num - at - lane;
        if (plain && left >= kLanes) {
          const int64_t offset = (first + at + lane) * kElementBytes;
          if (offset % 64 < kLanes * kElementBytes) {
            __builtin_prefetch(ahead + offset);
            if (Mac::kElements == 2) __builtin_prefetch(ahead + offset + odd_ahead);
          }
          store(group + lane, load_across_plain<Mac, kDType>(even, odd, first + at + lane));
          continue;
        }
        const int n = left < kLanes ? static_cast<int>(left < 0 ? 0 : left) : kLanes;
        store(group + lane, load_across<Mac>(even, odd, first + at + lane, n));
      }
    }
  }
}

#ifdef POLYHEAD_HAS_BF16_DOT
// The same of whole groups and pairs, from `rows` on, which lie row_elements apart.
inline void pack_pairs(float* out, int width, int64_t group_stride, const uint16_t* rows, int64_t row_elements,
                       int64_t num, int64_t words) {
  for (int64_t word = 0; word < words; ++word, out += width, rows += 2 * row_elements) {
    const uint16_t* const ahead = rows + (2 * word + kTermsAhead < 2 * words ? kTermsAhead * row_elements : 0);
    float* group = out;
    for (int64_t at = 0; at < num; at += width, group += group_stride) {
      for (int lane = 0; lane < width; lane += 2 * kLanes) {
        __builtin_prefetch(ahead + at + lane);
        __builtin_prefetch(ahead + row_elements + at + lane);
        F pairs[2];
        interleave_bf16(pairs, rows + at + lane, rows + row_elements + at + lane);
        store(group + lane, pairs[0]);
        store(group + lane + kLanes, pairs[1]);
      }
    }
  }
}
#endif

template <class Mac, DType kDType>
void pack_across(float* out, int width, int64_t group_stride, const Matrix& x, int64_t first, int64_t num,
                 int64_t first_k, int64_t num_k) {
#ifdef POLYHEAD_HAS_BF16_DOT
  if (Mac::kElements == 2 && width % (2 * kLanes) == 0 && contiguous(x.columns) && one_dim(x.rows) && num_k > 0) {
    const int64_t groups = num / width, words = num_k / 2, row_elements = x.rows.strides[2];
    pack_pairs(out, width, group_stride, u16(x.data) + first_k * row_elements + first, row_elements, groups * width,
               words);
    pack_across_any<Mac, kDType>(out + words * width, width, group_stride, x, first, groups * width,
                                 first_k + 2 * words, num_k - 2 * words);
    out += groups * group_stride, first += groups * width, num -= groups * width;
  }
#endif
  pack_across_any<Mac, kDType>(out, width, group_stride, x, first, num, first_k, num_k);
}

template <class Mac>
void pack_across(float* out, int width, int64_t group_stride, const Matrix& x, int64_t first, int64_t num,
                 int64_t first_k, int64_t num_k) {
  with_stored<Mac>(x.dtype, [&]<DType kDType>() {
    pack_across<Mac, kDType>(out, width, group_stride, x, first, num, first_k, num_k);
  });
}

// The same for whole vectors where x's columns are contiguous instead of its rows.
template <class Mac, DType kDType>
void pack_transposed(float* out, int64_t group_stride, const Matrix& x, int64_t first, int64_t num, int64_t first_k,
                     int64_t num_k) {
  using Stored = StoredWord<Mac, kDType>;
  const int64_t first_word = first_k / Mac::kElements, words = words_of(num_k, Mac::kElements);
  for (int64_t at = 0; at < num; at += kColumns, out += group_stride) {
    for (int lane = 0; lane < kColumns; lane += kLanes) {
      Line columns[kLanes];
      for (int i = 0; i < kLanes && at + lane + i < num; ++i) columns[i] = column_of(x, first + at + lane + i);
      const bool plain = contiguous(x.rows) && at + lane + kLanes <= num;
      const int64_t whole = plain ? num_k / Mac::kElements / kLanes * kLanes : 0;
      const char* source[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        source[i] = static_cast<const char*>(x.data) + (columns[i].first + first_k) * Stored::kElementBytes;
      }
      int64_t word = 0;
      for (; word < whole; word += kLanes) {
        F square[kLanes];
        Stored::load(square, source, word * Stored::kBytes);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(out + (word + i) * kColumns + lane, square[i]);
      }
      for (; word < words; word += kLanes) {
        const int n = words - word < kLanes ? static_cast<int>(words - word) : kLanes;
        F square[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          square[i] = columns[i].data == nullptr
                          ? broadcast(0.0f)
                          : load_line_words<Mac>(columns[i], first_word + word, n, first_k + num_k);
        }
        transpose(square);
        for (int i = 0; i < n; ++i) store(out + (word + i) * kColumns + lane, square[i]);
      }
    }
  }
}

// Panels of B for columns [first, first + num), `first` being a panel's first.
template <class Mac>
void pack_columns(float* out, int64_t panel_stride, const Matrix& b, int64_t first, int64_t num, int64_t first_k,
                  int64_t num_k) {
  const bool columns_contiguous = b.rows.strides[2] == 1 && b.columns.strides[2] != 1;
  if (columns_contiguous) {
    with_stored<Mac>(b.dtype, [&]<DType kDType>() {
      pack_transposed<Mac, kDType>(out, panel_stride, b, first, num, first_k, num_k);
    });
  } else {
    pack_across<Mac>(out, kColumns, panel_stride, b, first, num, first_k, num_k);
  }
}

// Whether A's words are packed row by row, or across the rows.
inline bool packs_along(const Matrix& a) { return a.columns.strides[2] == 1 || a.rows.strides[2] != 1; }

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
