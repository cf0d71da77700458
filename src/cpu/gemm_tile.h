// The sizes of products, and their microkernel.
//
// A panel is kColumns columns of B, packed as words [k][kColumns]; a tile is kTileRows rows of A against one panel, its
// sums in registers. A chunk is kChunkWords words along K: a chunk of a panel stays in the L1 cache while all rows of
// the task pass by, and the words of the rows, read as scalars that are broadcast, come from L2.
#pragma once

#include "cpu/line.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kTileRows = kLanes == 16 ? 12 : 6;
constexpr int kPanelVecs = 2;
constexpr int kColumns = kPanelVecs * kLanes;
constexpr int64_t kChunkWords = 256;
constexpr int kGroupPanels = 8;

// Words of A, of one chunk: [row][kRowStride] (kAlong; an odd number of cache lines, so that rows do not share sets),
// or [tile][word][kTileRows] with tiles kTileStride apart, where the rows of A are contiguous instead of its columns.
constexpr int64_t kRowStride = kChunkWords + 16;
constexpr int64_t kTileStride = kChunkWords * kTileRows + kLanes;  // a whole vector may be stored at the last word

// out[r][...] = (add: out[r][...] +) sum over words of A[r][word] panel[word][...], for kRows rows and kVecs_ vectors.
template <class Mac, bool kAlong, int kRows, int kVecs_>
void multiply(float* out, ptrdiff_t out_stride, const float* a, const float* panel, int64_t words, bool add) {
  F acc[kRows][kVecs_];
  clear(acc);
  contract<Mac, kAlong>(acc, panel, kColumns, a, kAlong ? kRowStride : kTileRows, words);
  if (add) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs_; ++v) acc[r][v] = acc[r][v] + load(out + r * out_stride + v * kLanes);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs_; ++v) store(out + r * out_stride + v * kLanes, acc[r][v]);
  }
}

// The same for the `rows` rows of one tile.
template <class Mac, bool kAlong, int kVecs_>
void multiply_tile(float* out, ptrdiff_t out_stride, const float* a, const float* panel, int64_t words, int rows,
                   bool add) {
  if (rows == kTileRows) return multiply<Mac, kAlong, kTileRows, kVecs_>(out, out_stride, a, panel, words, add);
  const auto step = [&](int done) {
    out += done * out_stride;
    a += done * (kAlong ? kRowStride : 1);
    rows -= done;
  };
  if constexpr (kTileRows > 8) {
    if (rows >= 8) {
      multiply<Mac, kAlong, 8, kVecs_>(out, out_stride, a, panel, words, add);
      step(8);
    }
  }
  if (rows >= 4) {
    multiply<Mac, kAlong, 4, kVecs_>(out, out_stride, a, panel, words, add);
    step(4);
  }
  if (rows >= 2) {
    multiply<Mac, kAlong, 2, kVecs_>(out, out_stride, a, panel, words, add);
    step(2);
  }
  if (rows == 1) multiply<Mac, kAlong, 1, kVecs_>(out, out_stride, a, panel, words, add);
}

// One panel's `columns` columns for all rows of a task.
template <class Mac, bool kAlong>
void multiply_panel(float* out, ptrdiff_t out_stride, const float* a, const float* panel, int64_t words, int64_t rows,
                    int64_t columns, bool add) {
  constexpr int64_t kNextTile = kAlong ? kTileRows * kRowStride : kTileStride;
  for (int64_t row = 0; row < rows; row += kTileRows, a += kNextTile) {
    const int count = rows - row < kTileRows ? static_cast<int>(rows - row) : kTileRows;
    if (columns <= kLanes) {
      multiply_tile<Mac, kAlong, 1>(out + row * out_stride, out_stride, a, panel, words, count, add);
    } else {
      multiply_tile<Mac, kAlong, 2>(out + row * out_stride, out_stride, a, panel, words, count, add);
    }
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
