// The vector words that kernels are written in, for the instruction set of this object. The simd_*.h files hold every
// intrinsic of the project; a kernel's source is the same for all of them and is compiled once per instruction set.
//
//   F      kLanes floats                         I      kLanes int32             M     one yes or no per lane
//   kRegisters                                   vectors that the CPU has room for
//   load store (unaligned); ..._first(p, n): the first n <= kLanes lanes only, others read as 0 and are not touched
//   fma(a, b, c) = a * b + c, fms = a * b - c     maximum(a, b): b where either is NaN
//   fma_lane<i>(a, b, c) = a * lane i of b + c, where POLYHEAD_HAS_FMA_LANE: one load brings kLanes scalars of b
//   divide(x, divisor, reciprocal)              x / divisor, rounded once; reciprocal = 1 / divisor, computed before
//   round_to_even, absolute                      scale_by_power(x, n, y) = x * 2^n for integer n; exactly 0 where y < -126
//   scale_by_small_power(x, n, y)                the same in fewer steps, but inf from n = 128 on
//   fraction(y), scale_by_floor(x, y)            y - floor(y), x * 2^floor(y) as scale_by_power, where POLYHEAD_HAS_FRACTION
//   scale_by_floor_flushed(x, y)                 the same while SubnormalsAsZero is there, beside registers tmm
//   mantissa in [1, 2), exponent                 of positive normal numbers
//   outside(x, limit): below 0, above limit, or NaN
//   less, equal -> M; both, either, negate, any, bits, mask_from_bits; select(m, a, b): a where m, else b
//   multiply_wide(a, b, high, low)               32 x 32 -> 64 bits, unsigned; b the same in every lane
//   load_bf16 load_f16 load_int8 load_bool store_bf16 store_f16     kLanes elements, converted (nearest even; NaN stays NaN)
//   load_bf16_first(p, n) load_f16_first         as load_first
//   nonzero_bytes(p)                             bit i tells whether byte i of 64 is not 0
//   transpose(rows)                              kLanes x kLanes
//   sums(rows)                                   lane i: the sum of the lanes of rows[i], the same tree for each
//   lane_sum(x), largest_lane(x)                 halves with halves, down to one float; of no NaN
//   load_quads(p) store_quads(p, x)             four neighbours at each of kLanes / 4 places; transpose_quads(rows) turns
//                                                4 x 4 of them: lane 4 q + j of row d <-> lane 4 q + d of row j
//   keep_in_register(x)                          the compiler may not fold or move what x holds (peak measurement)
//   dot_bf16(acc, a, b)                          acc + products of bfloat16 pairs; with these where POLYHEAD_HAS_BF16_DOT:
//   pair_bf16(even, odd) rounds two vectors into one of pairs, join_halves_bf16(first, second) into one of the pairs of the
//   first, then of the second; even_bf16, odd_bf16 take a pair apart; join_bf16 joins; interleave_bf16(words, even, odd)
//   makes pairs of two times 2 kLanes numbers in memory
//   NearestBf16: round(x), then value() of what it returns and join(even, odd) of two: as pair_bf16, but from the middle of two
//   numbers it goes away from 0, and NaN may be lost. Of additions, masks and permutations alone; who uses it keeps it in
//   registers
//   dot_int8(acc, a, b)                          acc + products of 4 unsigned bytes of a and signed ones of b, each lane;
//   with these where POLYHEAD_HAS_INT8_DOT: load_bytes(p), load_bytes_first(p, n) of 4 kLanes; store_low_bytes(p, x) of
//   kLanes; store_int, round_to_int; interleave_bytes(rows): of 4 rows lane 4 i + j of vector v becomes the bytes of
//   column 16 i + 4 v + j
//   pairs_from_table(p, table)                   2 kLanes bytes as pairs of bfloat16: of byte b the table's number b & 127, bit
//   7 as its sign. The table: 128 low bytes, 128 high ones, aligned to 64. Where POLYHEAD_HAS_BYTE_TABLE, which also has
//   floats_from_table(p, table): the same of kLanes bytes, as floats
//   load_int4(p)                                 kLanes numbers of 4 bits, two a byte, where POLYHEAD_HAS_INT4
//
// Where POLYHEAD_HAS_TMM there are eight registers tmm of 16 rows of 16 words besides. They hold something while a TmmInUse
// lives, which a task makes first of all:
//   tmm_zero<t>()   tmm_load<t>(p, stride)   tmm_store<t>(p, stride): rows `stride` words apart
//   tmm_load<t, true>(p, stride)                 past L1, which keeps what it has
//   tmm_dot_bf16<sum, a, b>()                    sum[i][j] += products of the pairs a[i][u] and b[u][j] over all u
//
// Everything lives in an unnamed namespace and nothing of the C++ library is used: an inline function of the standard
// library compiled with AVX-512 flags could become the copy that baseline code runs.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false, in GCC 12's own avx512fintrin.h
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wunused-function"  // no kernel needs every word
#endif

#include POLYHEAD_ISA_WORDS  // "cpu/isa/simd_<isa>.h"
