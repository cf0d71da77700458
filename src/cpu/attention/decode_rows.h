// The loader of decoding: a few rows of keys or values as vectors along head_dim read them, and the asking for later rows.
#pragma once

#include "cpu/attention/functions.h"
#include "cpu/isa/isa.h"
#include "cpu/isa/rows.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kDecodeBlock = 16;  // keys; a chunk's blocks are the bits of a word
static_assert(kDecodeChunk == 32 * kDecodeBlock && kDecodeBlock % kLanes == 0);

// How vectors of a row of kDType are read, from number d on: `first` reads n of them, the lanes behind them are 0.
struct FloatRow {
  using Element = float;
  using Mac = Float32;
  static constexpr DType kDType = DType::kFloat32;
  static inline F whole(const float* row, int64_t d) { return load(row + d); }
  static inline F first(const float* row, int64_t d, int n) { return load_first(row + d, n); }
};
// The same numbers, where no cache holds them (decode_products.h).
struct FloatRowFromMemory : FloatRow {};
struct BFloat16Row {
  using Element = uint16_t;
  using Mac = Float32;
  static constexpr DType kDType = DType::kBFloat16;
  static inline F whole(const uint16_t* row, int64_t d) { return load_bf16(row + d); }
  static inline F first(const uint16_t* row, int64_t d, int n) { return load_bf16_first(row + d, n); }
};
struct Float16Row {
  using Element = uint16_t;
  using Mac = Float32;
  static constexpr DType kDType = DType::kFloat16;
  static inline F whole(const uint16_t* row, int64_t d) { return load_f16(row + d); }
  static inline F first(const uint16_t* row, int64_t d, int n) { return load_f16_first(row + d, n); }
};

// Row::first of rows of bytes.
template <class Row>
inline F first_bytes(const uint8_t* row, int64_t d, int n) {
  alignas(64) uint8_t buffer[2 * kLanes] = {};
  for (int i = 0; i < n; ++i) buffer[i] = row[d + i];
  return Row::whole(buffer, 0);
}
// Of numbers of a byte, before their scale.
template <DType kStored>
struct ByteRow {
  using Element = uint8_t;
  using Mac = Float32;
  static constexpr DType kDType = kStored;
  static inline F whole(const uint8_t* row, int64_t d) { return load_stored(row + d, kStored); }
  static inline F first(const uint8_t* row, int64_t d, int n) { return first_bytes<ByteRow>(row, d, n); }
};
#ifdef POLYHEAD_HAS_BF16_DOT
struct BFloat16PairRow {
  using Element = uint16_t;
  using Mac = BFloat16Pair;
  static constexpr DType kDType = DType::kBFloat16;
  static inline F whole(const uint16_t* row, int64_t d) { return load(reinterpret_cast<const float*>(row + d)); }
  static inline F first(const uint16_t* row, int64_t d, int n) {
    if (n % 2 == 0) return load_first(reinterpret_cast<const float*>(row + d), n / 2);
    alignas(64) uint16_t buffer[2 * kLanes] = {};
    for (int i = 0; i < n; ++i) buffer[i] = row[d + i];
    return load(reinterpret_cast<const float*>(buffer));
  }
};

// Numbers of int8 as pairs of bfloat16, which hold them exactly.
struct Int8PairRow {
  using Element = uint8_t;
  using Mac = BFloat16Pair;
  static constexpr DType kDType = DType::kInt8;
  static inline F whole(const uint8_t* row, int64_t d) {
    return join_halves_bf16(load_stored(row + d, kDType), load_stored(row + d + kLanes, kDType));
  }
  static inline F first(const uint8_t* row, int64_t d, int n) { return first_bytes<Int8PairRow>(row, d, n); }
};
#endif

#ifdef POLYHEAD_HAS_BYTE_TABLE
// Numbers of float8 likewise.
template <DType kStored>
struct Float8PairRow {
  using Element = uint8_t;
  using Mac = BFloat16Pair;
  static constexpr DType kDType = kStored;
  static inline F whole(const uint8_t* row, int64_t d) { return pairs_from_table(row + d, float8_table(kStored)); }
  static inline F first(const uint8_t* row, int64_t d, int n) { return first_bytes<Float8PairRow>(row, d, n); }
};
#endif

// Numbers of 4 bits, of which each kGroup have a scale, times that.
struct Int4Row {
  using Element = uint8_t;
  using Mac = Float32;
  static constexpr DType kDType = DType::kInt4x2;
  static constexpr int kGroup = 32;
  struct At {
    const uint8_t* numbers;
    const float* scales;
  };
  static inline F whole(const At& row, int64_t d) {
    return load_int4(row.numbers + d / 2) * broadcast(row.scales[d / kGroup]);
  }
  static inline F first(const At& row, int64_t d, int) { return whole(row, d); }  // never: dims are whole groups
};

// Rows that follow each other and that no cache holds: each line is read once, in the order in which they lie, which memory
// and the hardware's own prefetching follow best. The same bits.
template <class Row>
struct InLine : Row {};
template <class Row>
constexpr bool kInLine = false;
template <class Row>
constexpr bool kInLine<InLine<Row>> = true;

// Keeps the compiler from reading what comes next before x.
inline __attribute__((always_inline)) F in_order(F x) {
  keep_in_register(x);
  return x;
}

// The runs of memory that will be read soon, `bytes` each: the next lies at next->data behind base.
struct AheadRuns {
  ptrdiff_t bytes = 0;
  uintptr_t base = 0;
  const PoolPlace* next = nullptr;  // null: what is at base once more

  uintptr_t take() { return base + (next != nullptr ? static_cast<uintptr_t>((next++)->data) : 0); }
};

// What will be read soon, asked for line after line in the order in which it lies, whatever the order of reading: memory
// and the hardware's own prefetching follow a line that grows, not 16 rows at once. Where a run ends, another is taken; what
// loops need of it in registers is the line and what is left.
struct Ahead {
  uintptr_t line = 0;
  ptrdiff_t left = 0;
  AheadRuns* runs = nullptr;

  // For kBytes bytes that are read.
  template <ptrdiff_t kBytes>
  inline __attribute__((always_inline)) void ask() {
#pragma GCC unroll 8
    for (ptrdiff_t at = 0; at < kBytes; at += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(line + static_cast<uintptr_t>(at)), 0, 2);
    }
    left -= kBytes;
    line += static_cast<uintptr_t>(kBytes);
    if (__builtin_expect(left <= 0, 0)) {
      left = runs->bytes;
      line = runs->take();
    }
  }
};

// What asks for one line again and again.
inline Ahead idle_ahead(AheadRuns& runs, const float* line) {
  runs = {kDecodeBlock, reinterpret_cast<uintptr_t>(line), nullptr};
  return {runs.base, runs.bytes, &runs};
}

// Keys or values of a few rows, where they lie or copied.
template <class Row>
struct RowsAt {
  const char* data;
  const PoolPlace* places;  // from data on
  int num_rows;

  using Place = const typename Row::Element*;
  Place row(int k) const { return reinterpret_cast<Place>(data + places[k].data); }
};
template <>
struct RowsAt<Int4Row> {
  const char* data;
  const PoolPlace* places;
  int num_rows;
  const float* scales;  // [num_rows][groups]
  int64_t groups;

  using Place = Int4Row::At;
  Place row(int k) const { return {reinterpret_cast<const uint8_t*>(data + places[k].data), scales + k * groups}; }
};

// How far ahead rows in line are asked for, in bytes; 0: they are not. Intel's cores hold few loads that wait where work waits
// for these: asking, memory is read at 14.5 GB/s instead of 10.5 in halves of lines (16 bits), and 15.9 instead of 14.9 in lines
// (Xeon, family 6 model 207, 2026-11-26; from 4 KiB on alike).
inline ptrdiff_t asked_in_line() { return by_intel() ? 8192 : 0; }

// Addresses that are computed, not read from the list: from memory, float32, one row, 29 GB/s instead of 17 (Zen 4).
template <class Row>
struct RowsAt<InLine<Row>> {
  const char* data;
  ptrdiff_t row_bytes;
  int num_rows;
  ptrdiff_t asked = asked_in_line();

  using Place = const typename Row::Element*;
  Place row(int k) const { return reinterpret_cast<Place>(data + k * row_bytes); }

  // For the `bytes` bytes from p on, which are read now.
  inline __attribute__((always_inline)) void ask(Place p, ptrdiff_t bytes) const {
    if (asked == 0) return;
    const char* const line = reinterpret_cast<const char*>(p) + asked;
    for (ptrdiff_t at = 0; at < bytes; at += 64) __builtin_prefetch(line + at, 0, 2);
  }
};

// Rows of x where they lie. `scales` is memory for those that are read as floats, [num_rows][dim / Int4Row::kGroup].
template <class Row>
inline RowsAt<Row> rows_in_place(const Rows& x, int num_rows, int64_t dim, float* scales) {
  if constexpr (Row::kDType == DType::kInt4x2) {
    const int64_t groups = dim / Row::kGroup;
    for (int k = 0; k < num_rows; ++k) {
      for (int64_t g = 0; g < groups; g += kLanes) {
        const int n = groups - g < kLanes ? static_cast<int>(groups - g) : kLanes;
        store_first(scales + k * groups + g, load_f16_first(u16(x.scale(k, g * Row::kGroup)), n), n);
      }
    }
    return {x.data, x.apart, num_rows, scales, groups};
  } else if constexpr (kInLine<Row>) {
    return {x.data + x.apart[0].data, x.row_bytes, num_rows};
  } else {
    return {x.data, x.apart, num_rows};
  }
}

// Whether Row reads rows where they lie.
template <class Row>
inline bool reads_in_place(const Rows& x) {
  return x.dtype == Row::kDType && x.column_stride == 1;
}

// Whether products of what Row reads are multiplied by scales, one a row, afterwards: in place or copied, so that strides and
// what is hidden change no bit.
template <class Row>
inline bool scales_later(const Rows& x) {
  return x.scales != nullptr && x.dtype == Row::kDType && x.dtype != DType::kInt4x2;
}

// Where rows of a copy lie.
struct CopyPlaces {
  PoolPlace at[kDecodeBlock];
  explicit CopyPlaces(int64_t row_bytes) {
    for (int k = 0; k < kDecodeBlock; ++k) at[k] = {k * row_bytes, 0};
  }
};

// Calls use(rows, columns) for keys that are copied as words.
template <class Mac, class Use>
inline void with_copied_keys(const Rows& x, int num_rows, int64_t dim, float* copy, const Use& use) {
  const int64_t words = words_of(dim, Mac::kElements);
  copy_rows<Mac>(copy, x, 0, num_rows, num_rows, dim);
  const CopyPlaces places(words * int64_t{sizeof(float)});
  const char* const data = reinterpret_cast<const char*>(copy);
#ifdef POLYHEAD_HAS_BF16_DOT
  if constexpr (Mac::kElements == 2) return use(RowsAt<BFloat16PairRow>{data, places.at, num_rows}, 2 * words);
#endif
  if constexpr (Mac::kElements == 1) use(RowsAt<FloatRow>{data, places.at, num_rows}, dim);
}

// Calls use(rows) for rows of bytes that are copied as they are.
template <class Row, class Use>
inline void with_copied_bytes(const Rows& x, int num_rows, int64_t dim, float* copy, const Use& use) {
  auto* const to = reinterpret_cast<char*>(copy);
  for (int k = 0; k < num_rows; ++k) {
    for (int64_t d = 0; d < dim; ++d) to[k * dim + d] = x.row(k)[d * x.column_stride];
  }
  const CopyPlaces places(dim);
  use(RowsAt<Row>{to, places.at, num_rows});
}

// Calls use(rows) for values that are copied as floats. With `finite`, NaN and inf are taken as 0.
template <class Use>
inline void with_copied_values(const Rows& x, int num_rows, int64_t dim, bool finite, float* copy, const Use& use) {
  copy_values<Float32>(copy, dim, x, 0, num_rows, num_rows, dim, finite);
  const CopyPlaces places(dim * int64_t{sizeof(float)});
  use(RowsAt<FloatRow>{reinterpret_cast<const char*>(copy), places.at, num_rows});
}

// The scales of a block of keys, each of whose rows has one; 0 behind the last.
struct BlockScales {
  F scale[kDecodeBlock / kLanes];
  BlockScales(const Rows& x, int num_keys) {
    alignas(64) float scales[kDecodeBlock] = {};
    for (int k = 0; k < num_keys; ++k) scales[k] = *f32(x.scale(k, 0));
    for (int v = 0; v < kDecodeBlock / kLanes; ++v) scale[v] = load(scales + v * kLanes);
  }
  bool finite() const {
    M all = mask_from_bits(~0u);
    for (const F& x : scale) all = both(all, equal(x - x, broadcast(0.0f)));
    return !any(negate(all));
  }
  void clear_not_finite() {
    for (F& x : scale) x = finite_or_zero(x);
  }
};

// to[row][key] = from[row][key] times what the stored numbers of the key's row are multiplied by.
inline void multiply_by_scales(float* to, const float* from, ptrdiff_t stride, int rows, DType dtype,
                               const BlockScales& scales) {
  const F factor = broadcast(stored_factor(dtype));
  for (int r = 0; r < rows; ++r, to += stride, from += stride) {
    for (int v = 0; v < kDecodeBlock / kLanes; ++v) {
      store(to + v * kLanes, load(from + v * kLanes) * factor * scales.scale[v]);
    }
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
