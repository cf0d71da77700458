// How two warps, a pair, bring chunks of rows of float32 to shared memory: a few columns of many, two of which lie side by side,
// or all columns of a few.
#pragma once

#include "cuda/tile.cuh"

namespace polyhead::cuda {

// Rows of a block in a matrix: its own ones, or the others, of which each head has so many.
struct Lines {
  const char* begin;          // where they are copied in pieces
  int row_bytes, head_bytes;  // from one to the next
  int whole;                  // columns, if they are copied in pieces
  unsigned count;
  Rows rows;      // for who reads element by element
  int64_t first;  // element
  int columns;

  __device__ Lines(const Rows& from, int64_t first_element, int num_columns, int64_t num_rows)
      : begin(static_cast<const char*>(from.data) + first_element * 4),
        row_bytes(static_cast<int>(from.row * 4)),
        head_bytes(static_cast<int>(from.head * 4)),
        whole(from.in_pieces && is_near(from.row) && is_near(from.head) ? num_columns : 0),
        count(num_rows < 0 ? 0 : static_cast<unsigned>(num_rows)),
        rows(from),
        first(first_element),
        columns(num_columns) {}

  // Where a row begins, and what is in its column, or 0.
  __device__ int64_t first_of(int head, int row) const { return first + head * rows.head + row * rows.row; }
  __device__ float number(bool there, int64_t row, int column) const {
    return there && column < columns ? number_at<Float32>(rows, row, column) : 0;
  }
  // Whether so many elements are bytes that an int holds.
  __device__ static bool is_near(int64_t elements) { return -(1 << 29) < elements && elements < 1 << 29; }
};
// x + bytes n, in one instruction.
__device__ inline const char* further(const char* x, int bytes, int n) {
  const char* y;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(y) : "r"(bytes), "r"(n), "l"(x));
  return y;
}

constexpr int kTerms = 16;  // columns of such a chunk
template <int kLines>
using Terms = float2[kTerms / 2][kLines + 2];  // two more, so that what is written lies in different banks

// What a thread of a pair brings of them: two columns, and those eight behind, of this line, and of those sixteen below. Four
// threads bring 32 bytes that lie side by side, and sixteen write to different banks.
struct PieceOfTerms {
  int two, line;
  __device__ explicit PieceOfTerms(int thread)
      : two(thread & 3), line((thread >> 2 & 1) + (thread & 8) + (thread >> 4) * 2) {}
};

// To shared memory, or zeros: `from` is not read then.
__device__ inline void copy_two(float2* to, const char* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 8 : 0)
               : "memory");
}

// Columns from `column` on, of rows from `row` on, all of which are there.
template <int kLines>
__device__ inline void copy_terms(Terms<kLines>& terms, const char* begin, int row_bytes, int row, int column,
                                  const PieceOfTerms& piece) {
  const char* const from = further(begin, row_bytes, row + piece.line) + (column + 2 * piece.two) * 4;
  float2* const to = &terms[piece.two][piece.line];
#pragma unroll
  for (int line = 0; line < kLines; line += 16) {
    const char* const of_line = line == 0 ? from : further(from, row_bytes, line);
    copy_two(to + line, of_line, true);
    copy_two(to + 4 * (kLines + 2) + line, of_line + 32, true);
  }
}
// The same of those that are there, and as they lie.
template <int kLines>
__device__ inline void load_terms(Terms<kLines>& to, const Lines& lines, int head, int row, int column,
                                  const PieceOfTerms& piece) {
#pragma unroll 1
  for (int m = 0; m < kLines / 8; ++m) {
    const int line = piece.line + m / 2 * 16, two = piece.two + m % 2 * 4, at = column + 2 * two;
    const int64_t begin = lines.first_of(head, row + line);
    const bool there = static_cast<unsigned>(row + line) < lines.count;
    if (lines.rows.in_pieces) {
      const bool both = there && at < lines.columns;
      copy_two(&to[two][line], static_cast<const char*>(lines.rows.data) + (both ? (begin + at) * 4 : 0), both);
    } else {
      to[two][line] = {lines.number(there, begin, at), lines.number(there, begin, at + 1)};
    }
  }
}

// The same of whole rows, eight threads to each.
template <int kRows, int kColumns>
__device__ inline void load_rows(float (&to)[kRows][kColumns], const Lines& lines, int head, int row, int column,
                                 int thread) {
  const int piece = (thread & 7) * 4, first = thread >> 3, row_bytes = lines.row_bytes;
  const bool columns_whole = column + kColumns <= lines.whole;
  if (columns_whole & (static_cast<unsigned>(row + kRows) <= lines.count)) {
    const char* const from =
        further(further(lines.begin, lines.head_bytes, head), row_bytes, row + first) + (column + piece) * 4;
    float* const at = &to[first][piece];
#pragma unroll
    for (int line = 0; line < kRows; line += 8) {
      const char* const of_line = line == 0 ? from : further(from, row_bytes, line);
#pragma unroll
      for (int c = 0; c < kColumns; c += 32) copy_piece(at + line * kColumns + c, of_line + 4 * c, true);
    }
    return;
  }
#pragma unroll 1
  for (int m = 0; m < kRows / 8 * (kColumns / 32); ++m) {
    const int line = first + m / (kColumns / 32) * 8, c = piece + m % (kColumns / 32) * 32, at = column + c;
    const int64_t begin = lines.first_of(head, row + line);
    const bool there = static_cast<unsigned>(row + line) < lines.count;
    if (lines.rows.in_pieces) {
      const bool all = there && at < lines.columns;
      copy_piece(&to[line][c], static_cast<const float*>(lines.rows.data) + (all ? begin + at : 0), all);
    } else {
      for (int n = 0; n < 4; ++n) to[line][c + n] = lines.number(there, begin, at + n);
    }
  }
}

}  // namespace polyhead::cuda
