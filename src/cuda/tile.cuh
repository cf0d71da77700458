// A tile of 64 rows in shared memory, and how it is filled. Pieces of 16 bytes are swizzled: piece c of row r lies at
// c ^ (r % 8), so that the eight rows of a matrix of ldmatrix lie in different banks.
#pragma once

#include "cuda/mma.cuh"
#include "cuda/problem.h"

namespace polyhead::cuda {

constexpr int kTileRows = 64, kThreads = 128, kPiece = 8;  // elements of 16 bytes

template <int kD>  // columns, a multiple of 64
struct Tile {
  uint16_t elements[kTileRows * kD];

  __device__ uint16_t* piece(int row, int c) { return elements + row * kD + (c ^ (row & 7)) * kPiece; }
  __device__ uint16_t element(int row, int column) { return piece(row, column / kPiece)[column % kPiece]; }
};

// 16 bytes to shared memory, or zeros: `from` is not read then.
__device__ inline void copy_piece(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Rows [first, first + 64) of a head: zeros from row `end` on and from column `columns` on. Copies are in flight until
// wait_for_copies() and a barrier.
template <int kD>
__device__ void load_tile(Tile<kD>& tile, const Rows& rows, int64_t batch, int64_t head, int64_t first, int64_t end,
                          int columns) {
  constexpr int kPieces = kD / kPiece;
  const uint16_t* base = static_cast<const uint16_t*>(rows.data) + batch * rows.batch + head * rows.head;
  for (int n = static_cast<int>(threadIdx.x); n < kTileRows * kPieces; n += kThreads) {
    const int row = n / kPieces, c = n % kPieces, column = c * kPiece;
    const bool there = first + row < end && column < columns;
    const uint16_t* from = base + (first + row) * rows.row + column * rows.column;
    if (rows.in_pieces) {
      copy_piece(tile.piece(row, c), there ? from : base, there);
      continue;
    }
    uint4 words;
    unsigned* word = &words.x;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const bool low = there && column + 2 * k < columns, high = there && column + 2 * k + 1 < columns;
      const unsigned low_bits = low ? from[2 * k * rows.column] : 0;
      word[k] = low_bits | (high ? static_cast<unsigned>(from[(2 * k + 1) * rows.column]) << 16 : 0);
    }
    *reinterpret_cast<uint4*>(tile.piece(row, c)) = words;
  }
  commit_copies();
}

// Turns what is not finite into zeros, and tells whether there was any, each thread in its own pieces.
template <class T, int kD>
__device__ bool clear_not_finite(Tile<kD>& tile) {
  bool found = false;
  for (int n = static_cast<int>(threadIdx.x); n < kTileRows * kD / kPiece; n += kThreads) {
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
__device__ bool has_not_finite(const Tile<kD>& tile) {
  unsigned bad = 0;
  for (int n = static_cast<int>(threadIdx.x); n < kTileRows * kD / kPiece; n += kThreads) {
    const uint4 words = reinterpret_cast<const uint4*>(tile.elements)[n];
    bad |= not_finite<T>(words.x) | not_finite<T>(words.y) | not_finite<T>(words.z) | not_finite<T>(words.w);
  }
  return bad != 0;
}

}  // namespace polyhead::cuda
