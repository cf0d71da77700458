// Products of a few query rows with keys and values as they lie in memory, lanes along head_dim: memory is read once, in
// long runs, while the sums stay in registers.
//   Q [rows][D]   S, P [rows][kRowScores]   O [rows][Dv]   K [keys][D], V [keys][Dv] by strides
#pragma once

#include "cpu/attention/decode_rows.h"
#include "cpu/attention/functions.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kRowScores = kDecodeChunk + kLanes;  // not a power of two: 4 rows fall into different sets of the L1

// Of a vector's elements where they lie.
template <class Row>
constexpr ptrdiff_t kVectorBytes = kLanes* Row::Mac::kElements* static_cast<ptrdiff_t>(sizeof(typename Row::Element));
template <>
constexpr ptrdiff_t kVectorBytes<Int4Row> = kLanes / 2;

// Keys that are read side by side: more would be more runs of memory at once than it is fast at. Measured on Zen 4
// (2026-11-22, one thread, 32x8x1/1024x64 in float16, [B, H, S, D], ms): 4 at once 2.64, 8 3.10, 16 4.19.
// kSumsAtOnce: vectors of O beside each other, which read as many of a value. Of long rows of float32 that come from memory both
// are half (Zen 4, 2026-11-23, one thread, ms): 8x32/8x1/4096x128 15.0 -> 12.9, 4x32/8x1/4096x128 7.1 -> 6.1,
// 1x32/8x1/16384x128 7.4 -> 6.0. From caches, and of 64 columns (4x32/8x1/4096x64 3.7 -> 3.9), they would lose.
template <class Row>
constexpr int kKeysAtOnce = 4;
template <>
constexpr int kKeysAtOnce<FloatRowFromMemory> = 2;
template <class Row>
constexpr int kSumsAtOnce = kRegisters == 32 ? 16 : 8;
template <>
constexpr int kSumsAtOnce<FloatRowFromMemory> = 8;
template <class Row>
constexpr int kSumsAtOnce<InLine<Row>> = 32;  // all columns: strips would leave lines behind

// Along the lanes still: sum[row][key] of kRows query rows and keys from kFirst of a step on.
template <class Row, int kRows, bool kPrefetch, int kFirst = 0>
inline __attribute__((always_inline)) void add_keys_of_step(F (&sum)[kLanes], const float* query,
                                                            ptrdiff_t query_stride,
                                                            const typename RowsAt<Row>::Place (&key)[kLanes / kRows],
                                                            int64_t dim, Ahead& ahead) {
  constexpr int kKeys = kLanes / kRows, kElements = Row::Mac::kElements * kLanes;
  constexpr int kEnd = kFirst + (kKeys < kKeysAtOnce<Row> ? kKeys : kKeysAtOnce<Row>);
  const auto add = [&](int64_t d, const auto& read) __attribute__((always_inline)) {
    F x[kKeys];
#pragma GCC unroll 16
    for (int k = kFirst; k < kEnd; ++k) x[k] = read(key[k]);
    if (kPrefetch) ahead.ask<(kEnd - kFirst) * kVectorBytes<Row>>();
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const F q = load(query + r * query_stride + d / Row::Mac::kElements);
#pragma GCC unroll 16
      for (int k = kFirst; k < kEnd; ++k) sum[r * kKeys + k] = Row::Mac::step(sum[r * kKeys + k], q, x[k]);
    }
  };
  int64_t d = 0;
  for (; d + kElements <= dim; d += kElements) add(d, [d](const auto& row) { return Row::whole(row, d); });
  if (d < dim) add(d, [d, dim](const auto& row) { return Row::first(row, d, static_cast<int>(dim - d)); });
  if constexpr (kEnd < kKeys) add_keys_of_step<Row, kRows, kPrefetch, kEnd>(sum, query, query_stride, key, dim, ahead);
}

// S of kRows query rows and kLanes / kRows keys, row after row in one vector.
template <class Row, int kRows, bool kPrefetch>
inline __attribute__((always_inline)) F score_step(const float* query, ptrdiff_t query_stride,
                                                   const typename RowsAt<Row>::Place (&key)[kLanes / kRows],
                                                   int64_t dim, Ahead& ahead) {
  F sum[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) sum[i] = broadcast(0.0f);
  add_keys_of_step<Row, kRows, kPrefetch>(sum, query, query_stride, key, dim, ahead);
  return sums(sum);
}

// The same of keys `first` and on, each read by itself and in line. A loop over keys that is not unrolled, sums that go through
// memory: 28 GB/s instead of 22 (Zen 4, float32, one row of 128 columns).
template <class Row, int kRows>
inline __attribute__((always_inline)) F score_step_in_line(const float* query, ptrdiff_t query_stride,
                                                           const RowsAt<Row>& x, int first, int64_t dim) {
  constexpr int kKeys = kLanes / kRows, kElements = Row::Mac::kElements * kLanes;
  alignas(64) float memory[kLanes][kLanes];
#pragma GCC unroll 1
  for (int k = 0; k < kKeys; ++k) {
    const auto key = x.row(first + k < x.num_rows ? first + k : x.num_rows - 1);
    x.ask(key, x.row_bytes);
    F sum[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r] = broadcast(0.0f);
    const auto add = [&](int64_t d, F numbers) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sum[r] = Row::Mac::step(sum[r], load(query + r * query_stride + d / Row::Mac::kElements), numbers);
      }
    };
    int64_t d = 0;
    for (; d + kElements <= dim; d += kElements) add(d, in_order(Row::whole(key, d)));
    if (d < dim) add(d, Row::first(key, d, static_cast<int>(dim - d)));
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) store(memory[r * kKeys + k], sum[r]);
  }
  F sum[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) sum[i] = load(memory[i]);
  return sums(sum);
}

template <int kRows>
inline void store_scores(float* scores, F s) {
  if constexpr (kRows == 1) {
    store(scores, s);
  } else {
    constexpr int kKeys = kLanes / kRows;
    alignas(64) float lanes[kLanes];
    store(lanes, s);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) __builtin_memcpy(scores + r * kRowScores, lanes + r * kKeys, kKeys * sizeof(float));
  }
}

// Rows behind the last whole kRows go by two, then by one: take.operator()<rows>(r).
template <int kRows, class Take>
inline void for_rows_left(int num_rows, const Take& take) {
  if constexpr (kRows == 4) {
    int r = num_rows / kRows * kRows;
    if (r + 2 <= num_rows) take.template operator()<2>(r), r += 2;
    if (r < num_rows) take.template operator()<1>(r);
  }
}

// scores[row][key] = Q K^T for all keys of x; num_rows is a multiple of kRows. What stands in the scores behind the last
// key, up to a multiple of kLanes, is not to be used.
template <class Row, int kRows>
inline __attribute__((always_inline)) void score_rows_of(float* scores, const float* query, ptrdiff_t query_stride,
                                                         int num_rows, const RowsAt<Row>& x, int64_t dim,
                                                         Ahead& asked) {
  constexpr int kKeys = kLanes / kRows;
  if constexpr (kInLine<Row>) {  // num_rows is kRows
    for (int k = 0; k < x.num_rows; k += kKeys) {
      store_scores<kRows>(scores + k, score_step_in_line<Row, kRows>(query, query_stride, x, k, dim));
    }
    return;
  }
  Ahead ahead = asked;  // in registers: stores of scores could not change it
  for (int k = 0; k < x.num_rows; k += kKeys) {
    typename RowsAt<Row>::Place key[kKeys];
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) key[i] = x.row(k + i < x.num_rows ? k + i : x.num_rows - 1);
    store_scores<kRows>(scores + k, score_step<Row, kRows, true>(query, query_stride, key, dim, ahead));
    for (int r = kRows; r < num_rows; r += kRows) {
      store_scores<kRows>(scores + r * kRowScores + k,
                          score_step<Row, kRows, false>(query + r * query_stride, query_stride, key, dim, ahead));
    }
  }
  asked = ahead;
}

// The same of any number of rows, kRows at least.
template <class Row, int kRows>
inline void score_rows(float* scores, const float* query, ptrdiff_t query_stride, int num_rows, const RowsAt<Row>& x,
                       int64_t dim, Ahead& asked) {
  score_rows_of<Row, kRows>(scores, query, query_stride, num_rows / kRows * kRows, x, dim, asked);
  for_rows_left<kRows>(num_rows, [&]<int kLeft>(int r) {
    AheadRuns runs;
    Ahead idle = idle_ahead(runs, query);
    score_rows<Row, kLeft>(scores + r * kRowScores, query + r * query_stride, query_stride, kLeft, x, dim, idle);
  });
}

// The same for sequences that share keys: a function of its own, which leaves that of the others as fast as it was.
template <class Row, int kRows>
__attribute__((noinline)) void score_shared_rows(float* scores, const float* query, ptrdiff_t query_stride,
                                                 int num_rows, const RowsAt<Row>& x, int64_t dim, Ahead& asked) {
  score_rows_of<Row, kRows>(scores, query, query_stride, num_rows, x, dim, asked);
}

// O of rows, padded to whole vectors; `fresh`: nothing has been added yet, and what lies there does not count.
struct RowSums {
  float* out;
  ptrdiff_t stride;
  bool fresh;
};

// O[row][kVecs_ vectors] += P V; kTail: the last vector, of which n lanes are there.
template <class Row, int kRows, int kVecs_, bool kTail, bool kPrefetch>
inline __attribute__((always_inline)) void accumulate_step(const RowSums& sums, const float* p, const RowsAt<Row>& x,
                                                           int64_t column, int n, Ahead& asked) {
  Ahead ahead = asked;
  float* const out = sums.out + column;
  F sum[kRows][kVecs_];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVecs_; ++v) {
      sum[r][v] = sums.fresh ? broadcast(0.0f) : load(out + r * sums.stride + v * kLanes);
    }
  }
  for (int k = 0; k < x.num_rows; ++k) {
    const auto value = x.row(k);
    if constexpr (kInLine<Row> && kPrefetch) x.ask(value + column, kVecs_ * kVectorBytes<Row>);
    F x_k[kVecs_];
#pragma GCC unroll 16
    for (int v = 0; v < kVecs_; ++v) {
      x_k[v] = kTail ? Row::first(value, column, n) : Row::whole(value, column + v * kLanes);
      if (kInLine<Row> && kPrefetch) x_k[v] = in_order(x_k[v]);
    }
    if (kPrefetch && !kInLine<Row>) ahead.ask<kVecs_ * kVectorBytes<Row>>();
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const F p_r = broadcast(p[r * kRowScores + k]);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs_; ++v) sum[r][v] = fma(p_r, x_k[v], sum[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVecs_; ++v) store(out + r * sums.stride + v * kLanes, sum[r][v]);
  }
  asked = ahead;
}

template <class Row, int kRows, int kVecs_, bool kPrefetch>
inline void accumulate_columns(const RowSums& sums, const float* p, const RowsAt<Row>& x, int64_t column, int64_t dim,
                               Ahead& ahead) {
  for (; column + kVecs_ * kLanes <= dim; column += kVecs_ * kLanes)
    accumulate_step<Row, kRows, kVecs_, false, kPrefetch>(sums, p, x, column, kLanes, ahead);
  if constexpr (kVecs_ > 1) {
    accumulate_columns<Row, kRows, kVecs_ / 2, kPrefetch>(sums, p, x, column, dim, ahead);
  } else if (column < dim) {
    accumulate_step<Row, kRows, 1, true, kPrefetch>(sums, p, x, column, static_cast<int>(dim - column), ahead);
  }
}

// O += P V for all values of x; rows as in score_rows.
template <class Row, int kRows>
inline void accumulate_rows_of(RowSums sums, const float* p, int num_rows, const RowsAt<Row>& x, int64_t dim,
                               Ahead& ahead) {
  constexpr int kSums = kSumsAtOnce<Row>, kMost = kInLine<Row> ? 16 : 8,
                kVecs_ = kSums / kRows < kMost ? kSums / kRows : kMost;
  accumulate_columns<Row, kRows, kVecs_, true>(sums, p, x, 0, dim, ahead);
  for (int r = kRows; r + kRows <= num_rows; r += kRows) {
    sums.out += kRows * sums.stride, p += kRows * kRowScores;
    accumulate_columns<Row, kRows, kVecs_, false>(sums, p, x, 0, dim, ahead);
  }
}

// The same of any number of rows, kRows at least.
template <class Row, int kRows>
inline void accumulate_rows(const RowSums& sums, const float* p, int num_rows, const RowsAt<Row>& x, int64_t dim,
                            Ahead& ahead) {
  accumulate_rows_of<Row, kRows>(sums, p, num_rows, x, dim, ahead);
  for_rows_left<kRows>(num_rows, [&]<int kLeft>(int r) {
    AheadRuns runs;
    Ahead idle = idle_ahead(runs, p);
    accumulate_rows_of<Row, kLeft>({sums.out + r * sums.stride, sums.stride, sums.fresh}, p + r * kRowScores, kLeft, x,
                                   dim, idle);
  });
}

// For sequences that share values, as score_shared_rows.
template <class Row, int kRows>
__attribute__((noinline)) void accumulate_shared_rows(const RowSums& sums, const float* p, int num_rows,
                                                      const RowsAt<Row>& x, int64_t dim, Ahead& ahead) {
  accumulate_rows_of<Row, kRows>(sums, p, num_rows, x, dim, ahead);
}

template <bool kPairs, DType kStored, class Work>
inline void with_float8_row([[maybe_unused]] DType query, const Work& work) {
#ifdef POLYHEAD_HAS_BYTE_TABLE
  if constexpr (kPairs) {
    if (query == DType::kBFloat16) return work.template operator()<Float8PairRow<kStored>>();
  }
#endif
  work.template operator()<ByteRow<kStored>>();
}

// Whether rows of x are read in line: those of one head that follow each other and come from memory, of at most two rows of
// queries. More cost arithmetic, which is faster on several keys side by side. Of the time without it (Zen 4, one thread,
// 8x32x1/4096x128 and 8x16/8x1, medians): float32 0.73 and 0.71, bfloat16 0.66 and 0.84, float16 0.76; four rows 1.0 and 1.2.
inline bool in_line(const DecodeTask& task, const Operand& x, int64_t dim) {
  if (!task.from_memory || task.num_heads > 1 || task.num_rows > 2) return false;
  if (x.page_table != nullptr || x.stride_d != 1 || x.stride_s != dim) return false;
  return dim * element_bytes(x.dtype) >= int64_t{128} * task.num_rows;
}

// Row, or the same in line.
template <class Row, class Work>
inline void with_row_in_line(const DecodeTask& task, const Operand& x, int64_t dim, const Work& work) {
  if constexpr (kLanes == 16) {
    if (x.dtype == Row::kDType && in_line(task, x, dim)) return work.template operator()<InLine<Row>>();
  }
  work.template operator()<Row>();
}

// Calls work.operator()<Row>() with what reads rows of x: where a dtype has several scales a row, as floats that are copied.
// kPairs: where queries are bfloat16, as pairs of these if the set multiplies pairs.
template <bool kPairs, class Work>
void with_row(const DecodeTask& task, [[maybe_unused]] DType query, const Operand& x, int64_t dim, const Work& work) {
  const bool one_scale = x.scales == nullptr || x.group >= dim;
  switch (one_scale || x.dtype == DType::kInt4x2 ? x.dtype : DType::kFloat32) {
    case DType::kBFloat16:
#ifdef POLYHEAD_HAS_BF16_DOT
      if constexpr (kPairs) return with_row_in_line<BFloat16PairRow>(task, x, dim, work);
#endif
      return with_row_in_line<BFloat16Row>(task, x, dim, work);
    case DType::kFloat16: return with_row_in_line<Float16Row>(task, x, dim, work);
    case DType::kInt8:
#ifdef POLYHEAD_HAS_BF16_DOT
      if constexpr (kPairs) {
        if (query == DType::kBFloat16) return work.template operator()<Int8PairRow>();
      }
#endif
      return work.template operator()<ByteRow<DType::kInt8>>();
    case DType::kInt4x2:
      if (x.group != Int4Row::kGroup || x.stride_d != 1 || x.scale_stride_d != 1) {
        return work.template operator()<FloatRow>();
      }
      return work.template operator()<Int4Row>();
    case DType::kFloat8E4M3: return with_float8_row<kPairs, DType::kFloat8E4M3>(query, work);
    case DType::kFloat8E5M2: return with_float8_row<kPairs, DType::kFloat8E5M2>(query, work);
    default:
      if constexpr (kLanes == 16) {
        if (task.from_memory && dim >= 128 && x.dtype == DType::kFloat32 && !in_line(task, x, dim))
          return work.template operator()<FloatRowFromMemory>();
      }
      return with_row_in_line<FloatRow>(task, x, dim, work);
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
