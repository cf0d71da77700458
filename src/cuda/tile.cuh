// A tile of 64 rows in shared memory, and how it is filled. Pieces of 16 bytes are swizzled: piece c of row r lies at
// c ^ (r % 8), so that the eight rows of a matrix of ldmatrix lie in different banks.
#pragma once

#include "cuda/mma.cuh"
#include "cuda/problem.h"

namespace polyhead::cuda {

constexpr int kTileRows = 64, kThreads = 128;

// The shared memory of a launch. Its size in the PTX, in a register that nobody reads, is for tests/cuda/kernel_table.py.
template <class Memory>
__device__ Memory& dynamic_shared() {
  extern __shared__ __align__(16) unsigned char memory[];
  asm volatile("{ .reg .b32 dynamic_shared_bytes; mov.b32 dynamic_shared_bytes, %0; }" ::"n"(sizeof(Memory)));
  return *reinterpret_cast<Memory*>(memory);
}

template <class T, int kD>  // columns, a multiple of 64
struct Tile {
  static constexpr int kPiece = 16 / sizeof(T);  // elements
  T elements[kTileRows * kD];

  __device__ T* piece(int row, int c) { return elements + row * kD + (c ^ (row & 7)) * kPiece; }
  __device__ T element(int row, int column) { return piece(row, column / kPiece)[column % kPiece]; }
};

// 16 bytes to shared memory, or zeros: `from` is not read then.
__device__ inline void copy_piece(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Row n of the tile from row_at(n), zeros if that is null, and from column `columns` on. Copies are in flight until
// wait_for_copies() and a barrier.
template <class T, int kD, class RowAt>
__device__ void load_rows(Tile<T, kD>& tile, const Rows& rows, int columns, const RowAt& row_at) {
  constexpr int kPiece = Tile<T, kD>::kPiece, kPieces = kD / kPiece, kInWord = kPiece / 4;
  for (int n = static_cast<int>(threadIdx.x); n < kTileRows * kPieces; n += kThreads) {
    const int row = n / kPieces, c = n % kPieces, column = c * kPiece;
    const T* const begin = row_at(row);
    const bool there = begin != nullptr && column < columns;
    const T* from = begin + column * rows.column;
    if (rows.in_pieces) {
      copy_piece(tile.piece(row, c), there ? from : static_cast<const T*>(rows.data), there);
      continue;
    }
    auto* words = reinterpret_cast<unsigned*>(tile.piece(row, c));
#pragma unroll 1
    for (int k = 0; k < 4; ++k) {
      const auto bits = [&](int n) { return there && column + n < columns ? unsigned{from[n * rows.column].bits} : 0; };
      unsigned word = bits(kInWord * k);
      if constexpr (kInWord == 2) word |= bits(2 * k + 1) << 16;
      words[k] = word;
    }
  }
  commit_copies();
}

// Rows [first, first + 64) of a head of a sequence, which begins at row `origin`: zeros from row `end` on.
template <class T, int kD>
__device__ void load_tile(Tile<T, kD>& tile, const Rows& rows, int64_t batch, int64_t head, int64_t origin,
                          int64_t first, int64_t end, int columns) {
  const T* base = static_cast<const T*>(rows.data) + batch * rows.batch + head * rows.head + origin * rows.row;
  load_rows(tile, rows, columns,
            [&](int row) { return first + row < end ? base + (first + row) * rows.row : nullptr; });
}

// Turns what is not finite in rows [first, first + rows) into zeros, and tells whether there was any, each thread in its own
// pieces.
template <class T, int kD>
__device__ bool clear_not_finite(Tile<T, kD>& tile, int first = 0, int rows = kTileRows) {
  constexpr int kPieces = kD / Tile<T, kD>::kPiece;
  bool found = false;
  for (int n = first * kPieces + static_cast<int>(threadIdx.x); n < (first + rows) * kPieces; n += kThreads) {
    auto* at = reinterpret_cast<uint4*>(tile.elements) + n;
    uint4 words = *at;
    const uint4 bad = {not_finite<T>(words.x), not_finite<T>(words.y), not_finite<T>(words.z), not_finite<T>(words.w)};
    if ((bad.x | bad.y | bad.z | bad.w) == 0) continue;
    found = true;
    *at = {words.x & ~bad.x, words.y & ~bad.y, words.z & ~bad.z, words.w & ~bad.w};
  }
  return found;
}

// Whether this thread's share of the tile holds an infinity or a NaN.
template <class T, int kD>
__device__ bool has_not_finite(const Tile<T, kD>& tile) {
  unsigned bad = 0;
  for (int n = static_cast<int>(threadIdx.x); n < kTileRows * kD / Tile<T, kD>::kPiece; n += kThreads) {
    const uint4 words = reinterpret_cast<const uint4*>(tile.elements)[n];
    bad |= not_finite<T>(words.x) | not_finite<T>(words.y) | not_finite<T>(words.z) | not_finite<T>(words.w);
  }
  return bad != 0;
}

}  // namespace polyhead::cuda
