// Products of weights and int8 values as they are stored, in sums of integers: their order changes no bit. Weights times scales
// become numbers of 16 bits: p scale = unit (256 high + low), in two planes of unsigned bytes. What is rounded there is 2^7 and
// more finer than bfloat16, and only for results in that.
#pragma once

#include "cpu/attention/decode_products.h"
#include "cpu/attention/decode_softmax.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

#ifdef POLYHEAD_HAS_INT8_DOT
static_assert(kLanes == kDecodeBlock);

constexpr int kBytesAtOnce = 4 * kLanes;
using Int8Row = ByteRow<DType::kInt8>;

// Ints of a plane of sums.
constexpr int64_t plane_ints(int64_t dim) { return whole(dim, kBytesAtOnce); }

// Bytes d and on of the rows of a block, of which `left` are there.
inline __attribute__((always_inline)) void load_block(I (&bytes)[kDecodeBlock],
                                                      const uint8_t* const (&row)[kDecodeBlock], int64_t d,
                                                      int64_t left) {
  if (left >= kBytesAtOnce) {
#pragma GCC unroll 16
    for (int k = 0; k < kDecodeBlock; ++k) bytes[k] = load_bytes(row[k] + d);
  } else {
#pragma GCC unroll 16
    for (int k = 0; k < kDecodeBlock; ++k) bytes[k] = load_bytes_first(row[k] + d, static_cast<int>(left));
  }
}

// Where the rows of a block lie; the last one instead of those behind it.
inline void list_rows(const uint8_t* (&row)[kDecodeBlock], const RowsAt<Int8Row>& x) {
  if (x.num_rows == kDecodeBlock) {
#pragma GCC unroll 16
    for (int k = 0; k < kDecodeBlock; ++k) row[k] = x.row(k);
    return;
  }
  for (int k = 0; k < kDecodeBlock; ++k) row[k] = x.row(k < x.num_rows ? k : x.num_rows - 1);
}

// Small numbers are lifted, so that what divides them does not overflow.
inline float lift_of(float largest) { return largest < 0x1p-60f ? 0x1p64f : 1.0f; }

// Weights of a row over a chunk's blocks, all >= 0 or NaN, -> planes where they were: of each block of keys 16 high bytes,
// then 16 low ones, from twice its first key on. Their unit; NaN if one is NaN.
inline float weights_to_planes(float* row, const DecodeChunk& chunk) {
  constexpr float kMost = 65535;
  F top = broadcast(0.0f), odd = broadcast(0.0f);
  for_each_block(chunk, [&](int key, int) {
    const F w = load(row + key);
    top = maximum(w, top);
    odd = odd + (w - w);
  });
  if (any(negate(equal(odd, broadcast(0.0f))))) return __builtin_nanf("");
  const float largest = largest_lane(top), lift = lift_of(largest);
  const float inverse = largest > 0 ? kMost / (largest * lift) : 0.0f;
  auto* const bytes = reinterpret_cast<uint8_t*>(row);
  for_each_block(chunk, [&](int key, int) {
    const I w = round_to_int(load(row + key) * broadcast(lift) * broadcast(inverse));
    store_low_bytes(bytes + 2 * key, shift_right<8>(w));
    store_low_bytes(bytes + 2 * key + kDecodeBlock, w);
  });
  return largest / kMost;
}

// sums[plane][64 columns, in the order of interleave_bytes] += planes of a row's weights times 64 columns of a block's values,
// quads[g] being those of the g-th 4 keys.
template <bool kPrefetch>
inline __attribute__((always_inline)) void accumulate_planes(int32_t* sums, ptrdiff_t plane_ints, const float* weights,
                                                             const I (&quads)[4][4], Ahead& ahead) {
#pragma GCC unroll 2
  for (int plane = 0; plane < 2; ++plane, sums += plane_ints) {
    I w[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) w[g] = broadcast_int(reinterpret_cast<const int32_t*>(weights)[4 * plane + g]);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      if (kPrefetch) ahead.ask<2 * kBytesAtOnce>();
      I sum = load_int(sums + v * kLanes);
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) sum = dot_int8(sum, w[g], quads[g][v]);
      store_int(sums + v * kLanes, sum);
    }
  }
}

// Of all rows of a head and all columns. `weights`: the block's planes of row 0; of the others, kRowScores behind each other.
inline void accumulate_bytes(int32_t* sums, ptrdiff_t plane_ints, const float* weights, int num_rows,
                             const RowsAt<Int8Row>& x, int64_t dim, Ahead& asked) {
  Ahead ahead = asked;
  const uint8_t* value[kDecodeBlock];
  list_rows(value, x);
  for (int64_t d = 0; d < dim; d += kBytesAtOnce) {
    I bytes[kDecodeBlock], quads[4][4];
    load_block(bytes, value, d, dim - d);
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) quads[g][i] = bytes[4 * g + i];
      interleave_bytes(quads[g]);
    }
    accumulate_planes<true>(sums + d, plane_ints, weights, quads, ahead);
    for (int r = 1; r < num_rows; ++r) {
      accumulate_planes<false>(sums + 2 * r * plane_ints + d, plane_ints, weights + r * kRowScores, quads, ahead);
    }
  }
  asked = ahead;
}

// One row's sums of the planes -> O.
inline void store_planes(float* out, int64_t out_stride, const int32_t* sums, ptrdiff_t plane_ints, float unit) {
  alignas(64) float behind[kLanes];
  for (int64_t d = 0; d < out_stride; d += kBytesAtOnce) {
    for (int v = 0; v < 4; ++v) {
      const int32_t* const at = sums + d + v * kLanes;
      const F sum = fma(to_float(load_int(at)), broadcast(256.0f), to_float(load_int(at + plane_ints)));
      float* to[4];
      for (int i = 0; i < 4; ++i) {
        const int64_t column = d + 16 * i + 4 * v;
        to[i] = column < out_stride ? out + column : behind;
      }
      store_quads(to, sum * broadcast(unit));
    }
  }
}
#else
constexpr int64_t plane_ints(int64_t) { return 0; }
#endif

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
