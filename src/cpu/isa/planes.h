// Numbers of float32 as planes of bfloat16, whose products registers tmm add up in float32: x = high + middle + low, each the
// nearest to what those before it leave, 8 bits of 24. Of the nine products of two numbers six are made; the others are
// below 2^-24 of the whole together. The sums err by less than half of what float32's own do (docs/decisions/0021).
//
// Numbers of 2^60 and more, inf and NaN have planes that add up to them, but products of these may be NaN where the number's
// are not: who multiplies keys and queries asks for them (`wild`) and computes those by other means. Products of planes below 2^-126
// are 0.
#pragma once

#include "cpu/isa/rows.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kPlanes = Float32Planes::kPlanes;

inline M wild(F x) { return negate(less(absolute(x), broadcast(0x1p60f))); }

// Planes of two vectors, as words of pairs.
struct PlaneWords {
  F plane[kPlanes];
};

inline __attribute__((always_inline)) PlaneWords split(F even, F odd) {
  PlaneWords words;
#pragma GCC unroll 4
  for (int i = 0; i < kPlanes; ++i) {
    const F word = pair_bf16(even, odd);
    words.plane[i] = word;
    even = even - even_bf16(word), odd = odd - odd_bf16(word);
  }
  return words;
}

// Of a wild number cut off instead of rounded, which might be inf. Each by itself: the others' planes stay what they are.
inline F high_plane(F x, F rounded) { return select(both(wild(x), equal(x, x)), odd_bf16(x), rounded); }

// The same of any numbers.
inline PlaneWords split_any(F even, F odd) {
  if (__builtin_expect(!any(either(wild(even), wild(odd))), 1)) return split(even, odd);
  const F word = pair_bf16(even, odd);
  const F high_even = high_plane(even, even_bf16(word)), high_odd = high_plane(odd, odd_bf16(word));
  const auto rest = [](F x, F high) { return select(equal(x - high, x - high), x - high, broadcast(0.0f)); };
  const PlaneWords left = split(rest(even, high_even), rest(odd, high_odd));
  return {{pair_bf16(high_even, high_odd), left.plane[0], left.plane[1]}};
}

inline F even_number(const PlaneWords& words) {
  return even_bf16(words.plane[0]) + (even_bf16(words.plane[1]) + even_bf16(words.plane[2]));
}
inline F odd_number(const PlaneWords& words) {
  return odd_bf16(words.plane[0]) + (odd_bf16(words.plane[1]) + odd_bf16(words.plane[2]));
}

inline PlaneWords load_planes(const float* words, ptrdiff_t plane_stride) {
  return {{load(words), load(words + plane_stride), load(words + 2 * plane_stride)}};
}
inline void store_planes(float* words, ptrdiff_t plane_stride, const PlaneWords& x) {
#pragma GCC unroll 4
  for (int i = 0; i < kPlanes; ++i) store(words + i * plane_stride, x.plane[i]);
}

// As load_columns, of n columns that may be none.
inline F columns_or_zero(const Rows& x, int64_t row, int64_t column, int64_t n) {
  if (n >= kLanes && x.dtype == DType::kFloat32 && x.column_stride == 1) return load(f32(x.row(row)) + column);
  if (n <= 0) return broadcast(0.0f);
  return load_columns(x, row, column, n < kLanes ? static_cast<int>(n) : kLanes);
}

// out[plane][word][lane] = word of row `lane`, whole words of kDimStep columns.
template <>
inline void transpose_rows<Float32Planes>(float* out, const Rows& x, int64_t num_rows, int64_t columns) {
  const int64_t words = row_words<Float32Planes>(columns);
  for (int64_t lane = 0; lane < whole(num_rows, kPartLanes); lane += kLanes) {
    for (int64_t d = 0; d < 2 * words; d += kLanes) {
      F square[kLanes];
      for (int64_t r = 0; r < kLanes; ++r) {
        square[r] = lane + r < num_rows ? columns_or_zero(x, lane + r, d, columns - d) : broadcast(0.0f);
      }
      transpose(square);
      for (int i = 0; i < kLanes; i += 2) {
        store_planes(out + (d + i) / 2 * kTile + lane, words * kTile, split_any(square[i], square[i + 1]));
      }
    }
  }
}

// Copied rows as registers take them.
inline Words plane_registers(const float* copy, int64_t words) {
  constexpr ptrdiff_t kStep = kPlanes * kRegisterPair;
  return {copy, static_cast<ptrdiff_t>(words / 16) * kStep, kPanel, kStep};
}

template <>
inline Words rows_as_words<Float32Planes>(float* copy, const Rows& x, int64_t first_row, int64_t num_rows,
                                          int64_t padded_rows, int64_t columns) {
  const int64_t words = row_words<Float32Planes>(columns);
  for (int64_t r = 0; r < padded_rows; ++r) {
    for (int64_t word = 0; word < words; word += kLanes) {
      const int64_t d = 2 * word, left = r < num_rows ? columns - d : 0;
      const PlaneWords halves = split_any(columns_or_zero(x, first_row + r, d, left),
                                          columns_or_zero(x, first_row + r, d + kLanes, left - kLanes));
      for (int i = 0; i < kPlanes; ++i) {
        const F in_line = join_halves_bf16(even_bf16(halves.plane[i]), odd_bf16(halves.plane[i]));
        store(copy + in_registers<Float32Planes>(r, word, words, i), in_line);
      }
    }
  }
  return plane_registers(copy, words);
}

// Rows d, words along the rows. With `finite`, NaN and inf become 0.
template <>
inline Words values_as_words<Float32Planes>(float* copy, const Rows& x, int64_t first_row, int64_t num_rows,
                                            int64_t padded_rows, int64_t columns, bool finite) {
  const int64_t words = padded_rows / 2;
  const auto load_row = [&](int64_t row, int64_t d) {
    const F x_r = row < num_rows ? columns_or_zero(x, first_row + row, d, columns - d) : broadcast(0.0f);
    return finite ? finite_or_zero(x_r) : x_r;
  };
  for (int64_t word = 0; word < words; word += kLanes) {
    for (int64_t d = 0; d < whole(columns, kDimStep); d += kLanes) {
      F square[kPlanes][kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int64_t row = 2 * (word + i);
        const PlaneWords pairs = split_any(load_row(row, d), load_row(row + 1, d));
        for (int p = 0; p < kPlanes; ++p) square[p][i] = pairs.plane[p];
      }
      for (int p = 0; p < kPlanes; ++p) {
        transpose(square[p]);
        for (int i = 0; i < kLanes; ++i) {
          store(copy + in_registers<Float32Planes>(d + i, word, words, p), square[p][i]);
        }
      }
    }
  }
  return plane_registers(copy, words);
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
