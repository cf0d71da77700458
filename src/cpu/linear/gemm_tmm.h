// The products of gemm_tile.h on registers of 16 x 16 words: four sums of a tile of 32 rows and a panel of 32 columns. A's
// words lie as [row][kRowStride] whatever its strides; behind the last they are 0 up to whole registers.
#pragma once

#include "cpu/isa/tmm_products.h"
#include "cpu/linear/gemm_pack.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

static_assert(kTileRows == 2 * kTmmRows && kColumns == 2 * kTmmRows);

// pack_along where the rows of A are contiguous instead of its columns; `across` is A transposed.
template <class Mac>
void pack_turned(float* out, const Matrix& across, int64_t first_row, int64_t num_rows, int64_t first_k,
                 int64_t num_k) {
  const int64_t end_k = first_k + num_k;
  const bool plain = contiguous(across.columns);
  for (int64_t r = 0; r < num_rows; r += kLanes) {
    const int n = num_rows - r < kLanes ? static_cast<int>(num_rows - r) : kLanes;
    for (int64_t word = 0; word < whole(words_of(num_k, Mac::kElements), kTmmRows); word += kLanes) {
      F square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int64_t k = first_k + (word + i) * Mac::kElements;
        square[i] = broadcast(0.0f);
        if (k >= end_k) continue;
        const Line even = row_of(across, k), odd = k + 1 < end_k ? row_of(across, k + 1) : Line();
        const bool whole_vector = plain && n == kLanes;
        square[i] = whole_vector ? load_across_plain<Mac, DType::kBFloat16>(even, odd, first_row + r)
                                 : load_across<Mac>(even, odd, first_row + r, n);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(out + (r + i) * kRowStride + word, square[i]);
    }
  }
}

// `rows` rows of kPanels x 16 columns of sums.
template <int kPanels>
inline void store_rows(const PanelSums& to, int64_t rows) {
  if (rows == kTileRows && to.rounded == nullptr && to.before.data == nullptr && to.onto.data == nullptr) {
    return store_sums<kPanels>(to.out, to.stride);
  }
  alignas(64) float sums[kTileRows * kColumns];
  store_sums<kPanels>(sums, kColumns);
  for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kPanels * kTmmRows; c += kLanes) {
      F x = load(sums + r * kColumns + c);
      for (const Onto& onto : {to.before, to.onto}) {
        if (onto.data != nullptr) x = x + load(onto.data + r * onto.stride + c);
      }
      if (to.rounded != nullptr) {
        store_bf16(to.rounded + r * to.stride + c, x);
      } else {
        store(to.out + r * to.stride + c, x);
      }
    }
  }
}

template <int kPanels>
void multiply_registers(const PanelSums& to, const LinesOfC& c, const float* a, const float* panel,
                        const float* next_panel, int64_t words, int64_t rows) {
  alignas(64) float last[kTmmRows * kColumns] = {};  // words of the panel, up to a whole register
  const int64_t whole_words = words / kTmmRows * kTmmRows;
  for (int64_t i = whole_words * kColumns; i < words * kColumns; i += kLanes) {
    store(last + i - whole_words * kColumns, load(panel + i));
  }
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows, lines_each = (2 * words + tiles - 1) / tiles;
  const int64_t rows_step = whole_words == 0 ? 0 : kTileRows * kTmmRows / whole_words + 1;
  for (int64_t tile = 0; tile < tiles; ++tile, a += kTileRows * kRowStride) {
    clear_sums<kPanels>();
    // Of the next panel, where one is packed, a share: the hardware does not know to follow.
    const float* next = next_panel == nullptr ? nullptr : next_panel + tile * lines_each * kTmmRows;
    const int64_t lines_step = next == nullptr ? 0 : lines_each * kTmmRows / (words < kTmmRows ? kTmmRows : words);
    const int64_t left = rows - tile * kTileRows, tile_rows = left < kTileRows ? left : kTileRows;
    // Likewise a line of each row of C, a few with each step.
    const char* const lines_of_c = c.data + tile * kTileRows * c.row_bytes;
    int64_t row = c.data == nullptr ? tile_rows : 0;
    for (int64_t word = 0; word < whole_words; word += kTmmRows) {
      for (const int64_t end = row + rows_step; row < end && row < tile_rows; ++row) {
        __builtin_prefetch(lines_of_c + row * c.row_bytes, 1, 3);
      }
      for (int64_t line = 0; line < lines_step; ++line, next += kTmmRows) __builtin_prefetch(next, 0, 2);
      multiply<kPanels, true>(a + word, kRowStride, panel + word * kColumns, kColumns);
    }
    if (whole_words < words) multiply<kPanels>(a + whole_words, kRowStride, last, kColumns);
    store_rows<kPanels>(to.from_row(tile * kTileRows), tile_rows);
  }
}

template <class Mac, bool kAlong>
void multiply_panels(const PanelSums (&to)[2], const LinesOfC& c, const float* a, const Panels& panels, int64_t words,
                     int64_t rows, const Packed& /*all*/) {
  if (panels.columns <= kTmmRows) {
    multiply_registers<1>(to[0], c, a, panels.data, panels.next, words, rows);
  } else {
    multiply_registers<2>(to[0], c, a, panels.data, panels.next, words, rows);
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
