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

// Sums of `rows` rows of kVecs_ vectors go from `sums`, stride kColumns, to where they belong.
template <int kVecs_>
inline void put_rows(const PanelSums& to, const float* sums, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs_ * kLanes; c += kLanes) {
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

// The same of kHalves x 16 rows and kSides x 16 columns that are in registers.
template <int kSides, int kHalves>
inline void put_registers(const PanelSums& to, int64_t rows) {
  if (rows == kHalves * kTmmRows && to.rounded == nullptr && to.before.data == nullptr && to.onto.data == nullptr) {
    return store_sums<kSides, kHalves>(to.out, to.stride);
  }
  alignas(64) float sums[kHalves * kTmmRows * kColumns];
  store_sums<kSides, kHalves>(sums, kColumns);
  put_rows<kSides * kTmmRows / kLanes>(to, sums, rows);
}

// What a tile's products ask for, with each step: of the panel `next`, `lines_step` cache lines; of the words of this panel and, behind
// them, `after` those kNearWords ahead, where this tile is the only one; `rows_step` rows of C.
struct StepsAhead {
  const float* next;
  int64_t lines_step;
  const float* after;  // null: nothing near
  LinesOfC c;
  int64_t rows_of_c, rows_step;
};
constexpr int64_t kNearWords = 2 * kTmmRows;

// kHalves x 16 rows and kSides x 16 columns. last: the panel's last words, up to a whole register.
template <int kSides, int kHalves>
inline void multiply_tile(const PanelSums& to, const float* a, const float* panel, const float* last, int64_t words,
                          int64_t rows, StepsAhead ahead) {
  clear_sums<kSides>();
  const int64_t whole_words = words / kTmmRows * kTmmRows;
  int64_t row = 0;
  for (int64_t word = 0; word < whole_words; word += kTmmRows) {
    for (const int64_t end = row + ahead.rows_step; row < end && row < ahead.rows_of_c; ++row) {
      __builtin_prefetch(ahead.c.data + row * ahead.c.row_bytes, 1, 3);
    }
    for (int64_t line = 0; line < ahead.lines_step; ++line, ahead.next += kTmmRows) {
      __builtin_prefetch(ahead.next, 0, 2);
    }
    if (ahead.after != nullptr) {
      const int64_t later = word + kNearWords - whole_words;
      const float* const near = later < 0 ? panel + (word + kNearWords) * kColumns : ahead.after + later * kColumns;
      for (int line = 0; line < kTmmRows * kColumns; line += kTmmRows) __builtin_prefetch(near + line);
    }
    multiply<kSides, true, kHalves>(a + word, kRowStride, panel + word * kColumns, kColumns);
  }
  if (whole_words < words) multiply<kSides, false, kHalves>(a + whole_words, kRowStride, last, kColumns);
  put_registers<kSides, kHalves>(to, rows);
}

template <int kSides>
void multiply_registers(const PanelSums& to, const LinesOfC& c, const float* a, const float* panel,
                        const float* next_panel, int64_t words, int64_t rows) {
  alignas(64) float last[kTmmRows * kColumns] = {};
  const int64_t whole_words = words / kTmmRows * kTmmRows;
  for (int64_t i = whole_words * kColumns; i < words * kColumns; i += kLanes) {
    store(last + i - whole_words * kColumns, load(panel + i));
  }
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows, lines_each = (2 * words + tiles - 1) / tiles;
  const int64_t rows_step = whole_words == 0 ? 0 : kTileRows * kTmmRows / whole_words + 1;
  for (int64_t tile = 0; tile < tiles; ++tile, a += kTileRows * kRowStride) {
    const int64_t left = rows - tile * kTileRows, tile_rows = left < kTileRows ? left : kTileRows;
    StepsAhead ahead{nullptr, 0, nullptr, c, c.data == nullptr ? 0 : tile_rows, rows_step};
    ahead.c.data += tile * kTileRows * c.row_bytes;
    if (next_panel != nullptr && tiles == 1) {
      ahead.after = next_panel;
    } else if (next_panel != nullptr) {  // a share: the hardware does not know to follow
      ahead.next = next_panel + tile * lines_each * kTmmRows;
      ahead.lines_step = lines_each * kTmmRows / (words < kTmmRows ? kTmmRows : words);
    }
    const PanelSums to_tile = to.from_row(tile * kTileRows);
    if (tile_rows <= kTmmRows) {
      multiply_tile<kSides, 1>(to_tile, a, panel, last, words, tile_rows, ahead);
    } else {
      multiply_tile<kSides, 2>(to_tile, a, panel, last, words, tile_rows, ahead);
    }
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
