// Many small heads (at most 16 queries, keys and dims), one head a lane: their rows as vectors over heads, and back.
#pragma once

#include "cpu/attention/functions.h"
#include "cpu/isa/elements.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int64_t padded(int64_t dim) { return (dim + 3) / 4 * 4; }

// The keys [begin[i], end[i]) that query i of a sequence sees, the same for all heads.
inline void set_key_ranges(int* begin, int* end, const Band& band, const Sequence& s) {
  for (int i = 0; i < s.len_q; ++i) {
    const KeyRange range = key_range(band, s, i);
    end[i] = static_cast<int>(range.end);
    begin[i] = range.begin < range.end ? static_cast<int>(range.begin) : end[i];
  }
}

// A matrix [rows][columns] of each of kLanes heads.
struct HeadRows {
  char* lane[kLanes];
  int64_t row_bytes, column_bytes;
  DType dtype;
};

inline char* head_address(const Operand& x, int64_t b, int64_t h) {
  return static_cast<char*>(x.data) + (b * x.stride_b + h * x.stride_h) * element_bytes(x.dtype);
}

// The lanes of one operand: heads from `first` on, counted b * num_heads + h, of which `group` read the same.
inline void set_rows(HeadRows& rows, const Operand& x, int64_t num_heads, int64_t group, int64_t first, int count) {
  const int64_t bytes = element_bytes(x.dtype);
  rows.row_bytes = x.stride_s * bytes;
  rows.column_bytes = x.stride_d * bytes;
  rows.dtype = x.dtype;
  const int64_t head_bytes = x.stride_h * bytes;
  int64_t b = first / num_heads, h = first % num_heads, in_group = h % group;
  char* head = head_address(x, b, h / group);
  for (int lane = 0; lane < kLanes; ++lane) {
    rows.lane[lane] = head;
    if (lane + 1 >= count) continue;
    if (++h == num_heads) {
      h = in_group = 0;
      head = head_address(x, ++b, 0);
    } else if (++in_group == group) {
      in_group = 0;
      head += head_bytes;
    }
  }
}

// A statistic as one row of columns.
inline Operand row_of(const Statistic& x) { return {x.data, DType::kFloat32, x.stride_b, 0, x.stride_h, x.stride_s}; }

inline const float* float_at(const char* p) { return reinterpret_cast<const float*>(p); }

// n <= 4 elements at byte offset `at` of every head: out[d], the lanes of d >= n are 0.
inline void load_columns_of_heads(F (&out)[4], const HeadRows& x, int64_t at, int n) {
  if (x.dtype == DType::kFloat32 && x.column_bytes == 4 && n == 4) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const float* quad[kLanes / 4];
#pragma GCC unroll 4
      for (int q = 0; q < kLanes / 4; ++q) quad[q] = float_at(x.lane[4 * q + j] + at);
      out[j] = load_quads(quad);
    }
  } else if (x.dtype == DType::kFloat32) {
    alignas(64) float buffer[4][kLanes] = {};
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int d = 0; d < n; ++d)
        __builtin_memcpy(&buffer[lane % 4][lane / 4 * 4 + d], x.lane[lane] + at + d * x.column_bytes, sizeof(float));
    }
    for (int j = 0; j < 4; ++j) out[j] = load(buffer[j]);
  } else {
    alignas(64) uint16_t buffer[4][kLanes] = {};
    for (int lane = 0; lane < kLanes; ++lane) {
      uint16_t* quad = &buffer[lane % 4][lane / 4 * 4];
      if (n == 4 && x.column_bytes == 2) {
        __builtin_memcpy(quad, x.lane[lane] + at, 4 * sizeof(uint16_t));
      } else {
        for (int d = 0; d < n; ++d)
          __builtin_memcpy(quad + d, x.lane[lane] + at + d * x.column_bytes, sizeof(uint16_t));
      }
    }
    for (int j = 0; j < 4; ++j) out[j] = load_halves(x.dtype, buffer[j]);
  }
  transpose_quads(out);
}

// Row `row` of every head: out[dim, padded by zeros to a multiple of 4].
inline void load_row_of_heads(F* out, const HeadRows& x, int64_t row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 4) {
    F quad[4];
    const int n = dim - d < 4 ? static_cast<int>(dim - d) : 4;
    load_columns_of_heads(quad, x, row * x.row_bytes + d * x.column_bytes, n);
    for (int i = 0; i < 4; ++i) out[d + i] = quad[i];
  }
}

// The other way, to the heads that are there.
inline void store_columns_of_heads(const HeadRows& x, int64_t at, int n, int count, F (&in)[4]) {
  transpose_quads(in);
  if (x.dtype == DType::kFloat32 && x.column_bytes == 4 && n == 4 && count == kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      float* quad[kLanes / 4];
#pragma GCC unroll 4
      for (int q = 0; q < kLanes / 4; ++q) quad[q] = reinterpret_cast<float*>(x.lane[4 * q + j] + at);
      store_quads(quad, in[j]);
    }
    return;
  }
  alignas(64) float floats[4][kLanes];
  alignas(64) uint16_t halves[4][kLanes];
  const bool floats_there = x.dtype == DType::kFloat32;
  for (int j = 0; j < 4; ++j) {
    if (floats_there) {
      store(floats[j], in[j]);
    } else {
      store_halves(x.dtype, halves[j], in[j]);
    }
  }
  for (int lane = 0; lane < count; ++lane) {
    if (!floats_there && n == 4 && x.column_bytes == 2) {
      __builtin_memcpy(x.lane[lane] + at, &halves[lane % 4][lane / 4 * 4], 4 * sizeof(uint16_t));
      continue;
    }
    for (int d = 0; d < n; ++d) {
      char* target = x.lane[lane] + at + d * x.column_bytes;
      const int column = lane / 4 * 4 + d;
      if (floats_there) {
        __builtin_memcpy(target, &floats[lane % 4][column], 4);
      } else {
        __builtin_memcpy(target, &halves[lane % 4][column], 2);
      }
    }
  }
}

// s[j] = sum over the dims, in order, of query * row j.
template <int kDims>
inline void multiply_rows_of(F* s, const F* query, const F* rows, int begin, int end) {
  F q[kDims];
#pragma GCC unroll 16
  for (int d = 0; d < kDims; ++d) q[d] = query[d];
  for (int j = begin; j < end; ++j) {
    F sum = q[0] * rows[j * kDims];
#pragma GCC unroll 16
    for (int d = 1; d < kDims; ++d) sum = fma(q[d], rows[j * kDims + d], sum);
    s[j] = sum;
  }
}

inline void multiply_rows(F* s, const F* query, const F* rows, int64_t dim, int begin, int end) {
  switch ((dim + 3) / 4) {
    case 1: multiply_rows_of<4>(s, query, rows, begin, end); break;
    case 2: multiply_rows_of<8>(s, query, rows, begin, end); break;
    case 3: multiply_rows_of<12>(s, query, rows, begin, end); break;
    default: multiply_rows_of<16>(s, query, rows, begin, end); break;
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
