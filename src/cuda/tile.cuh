// A tile of rows, 64 if nobody says otherwise, in shared memory, and how it is filled.
#pragma once

#include "cuda/mma.cuh"
#include "cuda/problem.h"

namespace polyhead::cuda {

constexpr int kTileRows = kBlockRows, kThreads = kBlockThreads;

// The shared memory of a launch. Its size in the PTX, in a register that nobody reads, is for tests/cuda/kernel_table.py.
template <class Memory>
__device__ Memory& dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char memory[];
  asm volatile("{ .reg .b32 dynamic_shared_bytes; mov.b32 dynamic_shared_bytes, %0; }" ::"n"(sizeof(Memory)));
  return *reinterpret_cast<Memory*>(memory);
}

// Where the pieces of a row lie, 16 bytes each. Swizzled: piece c of row r at c ^ (r % 8), of rows of 64 bytes at c ^ (r / 2 % 4),
// so that the same piece of eight rows, as a matrix of ldmatrix has them, lies in different banks. Padded with one piece they
// do, too, which takes memory, and no instruction to find a piece. In order: for who reads a row at a time.
enum class Layout { kSwizzled, kPadded, kInOrder, kPanels };

template <class T, int kD, int kRows = kTileRows,
          Layout kLayout = Layout::kSwizzled>  // columns: a multiple of 64 bytes
struct Tile {
  static constexpr bool kPadded = kLayout == Layout::kPadded;
  static constexpr int kPiece = 16 / sizeof(T), kPieces = kD / kPiece;  // elements; pieces of a row
  static constexpr unsigned kRowBytes = kD * sizeof(T) + (kPadded ? 16 : 0);
  static constexpr unsigned kAlignment = kPadded ? 16 : kLayout == Layout::kPanels ? 1024 : kRowBytes;
  alignas(kAlignment) T elements[kRows * kRowBytes / sizeof(T)];

  __device__ T* piece(int row, int c) {
    if constexpr (kPadded) return elements + (row * (kPieces + 1) + c) * kPiece;
    if constexpr (kLayout == Layout::kInOrder) return elements + row * kD + c * kPiece;
    if constexpr (kLayout == Layout::kPanels) {
      return elements + ((c / 8 * kRows + row) * 8 + (c % 8 ^ (row & 7))) * kPiece;
    }
    return elements + row * kD + (c ^ (kPieces == 4 ? row / 2 & 3 : row & 7)) * kPiece;
  }
  // Of all pieces, in any order.
  __device__ const uint4& any_piece(int n) const {
    return reinterpret_cast<const uint4*>(elements)[kPadded ? n + n / kPieces : n];
  }
  // Where piece c of a row lies in shared memory. Piece c ^ x lies at address ^ 16 x, or of a padded row c + x at + 16 x.
  __device__ unsigned address(int row, int c) { return shared_address(piece(row, c)); }
  __device__ T element(int row, int column) { return piece(row, column / kPiece)[column % kPiece]; }
};

// 16 bytes to shared memory, or zeros: `from` is not read then.
__device__ inline void copy_piece(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
// The same of one float.
__device__ inline void copy_float(float* to, const float* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 4 : 0)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last `kGroups` groups of copies have landed.
template <int kGroups>
__device__ inline void wait_for_copies_before() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Where a row begins that is not there.
constexpr int64_t kNoRow = INT64_MIN;

// Columns of a row that lie in shared memory at a time: of wide rows a slice, since no more fits.
template <class T, int kD>
constexpr int kSliceColumns = kD < 128 || (T::kOnTensorCores && kD <= kMostTileColumns) ? kD : 128;
template <class T, int kD>
constexpr bool kSliced = kSliceColumns<T, kD> < kD;
// How many slices there are, of rows of `columns`.
template <class T, int kD>
__host__ __device__ constexpr int slices_of(int columns) {
  constexpr int kSlice = kSliceColumns<T, kD>;
  if constexpr (kD <= kMostTileColumns) return kD / kSlice;
  return columns > kSlice ? (columns + kSlice - 1) / kSlice : 1;
}

// The bits of element n of rows, in a word. Float32 may be made of other numbers.
template <class T>
__device__ inline unsigned element_bits(const Rows& rows, int64_t n) {
  if constexpr (T::kOnTensorCores) return static_cast<const T*>(rows.data)[n].bits;
  return __float_as_uint(load_number(rows.data, rows.number, n));
}
template <class T>
__device__ inline float element(const Rows& rows, int64_t n) {
  if constexpr (T::kOnTensorCores) return to_float(static_cast<const T*>(rows.data)[n]);
  return load_number(rows.data, rows.number, n);
}

__device__ inline bool is_there(int64_t row) { return row != kNoRow; }

// Who takes part in filling a tile: all threads of a block, or a warpgroup of one.
struct WholeBlock {
  static constexpr int kThreads = kBlockThreads;
  __device__ static int number() { return static_cast<int>(threadIdx.x); }
};
struct OneGroup {
  static constexpr int kThreads = 128;
  __device__ static int number() { return static_cast<int>(threadIdx.x) % kThreads; }
};

// The number in a column of the row that begins at element `row`.
template <class T>
__device__ inline float number_at(const Rows& rows, int64_t row, int column) {
  return element<T>(rows, row + column * rows.column);
}

// Rows that hold T's, or float32's.
template <class T>
__device__ inline void store_sum(const Rows& rows, int64_t n, float x) {
  if (!T::kOnTensorCores || rows.number == Number::kFloat32) {
    static_cast<float*>(rows.data)[n] = x;
  } else {
    static_cast<T*>(rows.data)[n] = rounded<T>(x);
  }
}

// Piece c of a row of the tile, which begins at element `begin`, an element at a time.
template <class T, int kD, int kRows, Layout kLayout>
__device__ void load_elements(Tile<T, kD, kRows, kLayout>& tile, const Rows& rows, int columns, int row, int c,
                              int64_t begin) {
  constexpr int kPiece = Tile<T, kD>::kPiece, kInWord = kPiece / 4;
  const int column = c * kPiece;
  auto* words = reinterpret_cast<unsigned*>(tile.piece(row, c));
#pragma unroll 1
  for (int k = 0; k < 4; ++k) {
    const auto bits = [&](int n) {
      const bool there = begin != kNoRow && column + n < columns;
      return there ? element_bits<T>(rows, begin + (column + n) * rows.column) : 0;
    };
    unsigned word = bits(kInWord * k);
    if constexpr (kInWord == 2) word |= bits(2 * k + 1) << 16;
    words[k] = word;
  }
}

// Row n of the tile from element row_at(n) of `rows` on, zeros if that is kNoRow, and from column `columns` on. Copies are
// in flight until wait_for_copies() and a barrier.
template <class T, int kD, int kRows, Layout kLayout, class RowAt, class Who = WholeBlock>
__device__ void load_rows(Tile<T, kD, kRows, kLayout>& tile, const Rows& rows, int columns, const RowAt& row_at,
                          Who = {}) {
  constexpr int kPiece = Tile<T, kD>::kPiece, kPieces = kD / kPiece, kStep = Who::kThreads / kPieces;
  const int first = Who::number() / kPieces, c = Who::number() % kPieces;
#pragma unroll 1
  for (int row = first; row < kRows; row += kStep) {
    const int64_t begin = row_at(row);
    const bool there = begin != kNoRow && c * kPiece < columns;
    if (rows.in_pieces) {
      copy_piece(tile.piece(row, c), static_cast<const T*>(rows.data) + (there ? begin + c * kPiece : 0), there);
    } else {
      load_elements(tile, rows, columns, row, c, begin);
    }
  }
  commit_copies();
}

// The same of rows that lie rows.row apart, the first at element `begin`: zeros from row `end` of the tile on.
template <class T, int kD, int kRows, Layout kLayout, class Index, class Who = WholeBlock>
__device__ void load_rows_apart(Tile<T, kD, kRows, kLayout>& tile, const Rows& rows, int columns, int64_t begin,
                                Index end, Who = {}) {
  if (!rows.in_pieces) {
    load_rows(
        tile, rows, columns, [&](int row) { return row < end ? begin + row * rows.row : kNoRow; }, Who());
    return;
  }
  constexpr int kPiece = Tile<T, kD>::kPiece, kPieces = kD / kPiece, kStep = Who::kThreads / kPieces;
  const int first = Who::number() / kPieces, c = Who::number() % kPieces;
  const T* from = static_cast<const T*>(rows.data) + (begin + first * rows.row + c * kPiece);
  int left = end < 0 || c * kPiece >= columns ? 0 : end < kRows ? static_cast<int>(end) : kRows;
  left -= first;
#pragma unroll
  for (int n = 0; n < kRows; n += kStep, from += kStep * rows.row) copy_piece(tile.piece(first + n, c), from, n < left);
  commit_copies();
}

// The same with eight threads to a row, for loops that load whole tiles: fewer places are computed.
template <class T, int kD, int kRows, Layout kLayout>
__device__ void load_lines(Tile<T, kD, kRows, kLayout>& tile, const Rows& rows, int columns, int64_t begin,
                           int64_t end) {
  if (!rows.in_pieces || end < kRows) {
    load_rows(tile, rows, columns, [&](int row) { return row < end ? begin + row * rows.row : kNoRow; });
    return;
  }
  constexpr int kPiece = Tile<T, kD>::kPiece, kAcross = 8, kStep = kThreads / kAcross;
  const int first = static_cast<int>(threadIdx.x) / kAcross, c = static_cast<int>(threadIdx.x) % kAcross;
  const T* from = static_cast<const T*>(rows.data) + (begin + first * rows.row + c * kPiece);
#pragma unroll
  for (int n = 0; n < kRows; n += kStep, from += kStep * rows.row) {
#pragma unroll
    for (int line = 0; line < kD / kPiece; line += kAcross) {
      copy_piece(tile.piece(first + n, c + line), from + line * kPiece, (c + line) * kPiece < columns);
    }
  }
  commit_copies();
}

// Rows [first, first + 64) of a head of a sequence, which begins at row `origin`: zeros from row `end` on. From column
// `from` on.
template <class T, int kD, Layout kLayout>
__device__ void load_tile(Tile<T, kD, kTileRows, kLayout>& tile, const Rows& rows, int64_t batch, int64_t head,
                          int64_t origin, int64_t first, int64_t end, int columns, int from = 0) {
  const int64_t begin = batch * rows.batch + head * rows.head + (origin + first) * rows.row + from * rows.column;
  load_rows_apart(tile, rows, columns - from, begin, end - first);
}

// Turns what is not finite in rows [first, first + rows) into zeros, and tells whether there was any, each thread in its own
// pieces.
template <class T, int kD, int kRows, Layout kLayout>
__device__ bool clear_not_finite(Tile<T, kD, kRows, kLayout>& tile, int first = 0, int rows = kRows) {
  constexpr int kPieces = kD / Tile<T, kD>::kPiece;
  bool found = false;
  for (int n = first * kPieces + static_cast<int>(threadIdx.x); n < (first + rows) * kPieces; n += kThreads) {
    auto* at = const_cast<uint4*>(&tile.any_piece(n));
    uint4 words = *at;
    const uint4 bad = {not_finite<T>(words.x), not_finite<T>(words.y), not_finite<T>(words.z), not_finite<T>(words.w)};
    if ((bad.x | bad.y | bad.z | bad.w) == 0) continue;
    found = true;
    *at = {words.x & ~bad.x, words.y & ~bad.y, words.z & ~bad.z, words.w & ~bad.w};
  }
  return found;
}

// Whether this thread's share of the tile holds an infinity or a NaN.
template <class T, int kD, Layout kLayout>
__device__ bool has_not_finite(const Tile<T, kD, kTileRows, kLayout>& tile) {
  unsigned bad = 0;
  for (int n = static_cast<int>(threadIdx.x); n < kTileRows * kD / Tile<T, kD>::kPiece; n += kThreads) {
    const uint4 words = tile.any_piece(n);
    bad |= not_finite<T>(words.x) | not_finite<T>(words.y) | not_finite<T>(words.z) | not_finite<T>(words.w);
  }
  return bad != 0;
}

}  // namespace polyhead::cuda
