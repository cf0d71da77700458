// The sizes of products, and their microkernel.
//
// A panel is kColumns columns of B, packed as words [k][kColumns]; a tile is kTileRows rows of A against one panel, its
// sums in registers. A chunk is kChunkWords words along K: a chunk of a panel (64 or 96 KiB) and of a tile's rows, read as
// scalars that are broadcast, come from L2 at 15 bytes a cycle. Measured on Zen 5 (2026-11-21, float32, one thread,
// GFLOP/s of 257 at [384, 1024] x [1024, 1024]): chunks of 256 words 249, 384 254, 512 255. Vectors of 16 take 768: sums of
// that many terms, a usual size of models, go to C at once. Zen 4 (2026-11-25, float32, one thread, ms of 3.83 and 15.3 at
// [384, 768] x [768, 768] and [768, 3072]): 512 4.05 and 16.74, 768 3.94 and 16.25; [384, 3072] x [3072, 768] 16.26 and 16.46.
// Registers tmm take 256: a panel's chunk, 32 KiB, stays in L1 beside rows of A that pass it by (Xeon, family 6 model 167,
// 2026-11-28, bfloat16, one thread, ms at [3072, 768] x [768, 768] and [384, 4096] x [4096, 1024]: 512 3.42, 3.10; 384 3.31,
// 3.17; 256 2.67, 2.49).
#pragma once

#include "cpu/linear/line.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kTileRows = kTmm ? 32 : kRegisters == 16 ? 6 : kLanes == 16 ? 12 : 8;
constexpr int kPanelVecs = kTmm ? 32 / kLanes : 2;
constexpr int kColumns = kPanelVecs * kLanes;
constexpr int64_t kChunkWords = kTmm ? 256 : kLanes == 16 ? 768 : 512;
constexpr int kGroupPanels = kColumns < 64 ? 64 / kColumns : 1;  // packed together by a task that packs B itself
constexpr bool kPairs = !kTmm && kLanes == 16;  // many rows take two panels at a time, six rows against both

// So many rows are one part where B is not packed before: it packs a few panels, which stay in L2, asks for the columns that
// come next, and multiplies all rows by them, which come from L3 once for each pair of panels. Measured on a Xeon (family 6 model
// 106, 2026-11-27, float32, columns of B contiguous, ms on one thread and two) when all of B was packed before, or A where B is
// larger, and now, M x N x K: 16 x 1024 x 1024 0.54, 0.44; 0.32, 0.25; 64 x 1024 x 4096 4.8, 4.4; 2.7, 2.4; 200 x 1024 x 1024
// 3.4, 2.8; 1.7, 1.4; 384 x 512 x 512 1.28, 1.25; 0.71, 0.68; 384 x 1024 x 1024 5.6, 5.2; 2.8, 2.65. Registers tmm (model
// 167, 2026-11-28, bfloat16), when more than 256 rows packed all of B before, and now: 384 x 1024 x 1024 0.85, 0.75; 0.52,
// 0.37; 384 x 512 x 512 0.149, 0.137; 0.107, 0.076. Up to 1,024 rows 1024 x 1024 x 1024 would take 2.5; 1.2 instead of 1.9; 1.06.
constexpr int64_t kUnpackedRows = 512;

// Parts of one thread's work. Rows share the packed columns of B, columns the packed rows of A: the more of both, the
// less is packed and read again. A part's chunk of A (300 KiB) and its sums (590 KiB) are in a 1 MiB L2. Measured on
// Zen 5 (2026-11-21, float32, one thread, GFLOP/s at [3072, 1024] x [1024, 1024]; weights of as many tokens): 144 x 512
// 227; 221, 192 x 512 229; 220, 96 x 1024 236; 226, 144 x 1024 235; 227. Of registers tmm, whose chunks are short, on a Xeon
// (family 6 model 167, 2026-11-28, bfloat16, one thread, ms at [3072, 1024] x [1024, 1024] and [3072, 1024] x [1024, 4096]):
// 144 x 1024 5.7, 30; 144 x 512 5.0, 28; 192 x 1024 5.6, 28; 256 x 512 4.8, 23.
constexpr int64_t kPartRows = kTmm ? 256 : 144, kPartColumns = kTmm ? 512 : 1024;

// Words of A, of one chunk: [row][kRowStride] (kAlong; an odd number of cache lines, so that rows do not share sets),
// or [tile][word][kTileRows] with tiles kTileStride apart, where the rows of A are contiguous instead of its columns.
constexpr int64_t kRowStride = kChunkWords + 16;
constexpr int64_t kTileStride = kChunkWords * kTileRows + kLanes;  // a whole vector may be stored at the last word

// What is added to the sums of rows `stride` apart: earlier sums, or, 0 apart, a bias. Null: nothing.
struct Onto {
  const float* data;
  ptrdiff_t stride;

  Onto from_row(ptrdiff_t row) const { return {data == nullptr ? nullptr : data + row * stride, stride}; }
};

// Where the sums of a panel's columns go, and what is added on the way: those of the chunks before, then C as it is or a bias.
struct PanelSums {
  float* out;
  ptrdiff_t stride;
  Onto before, onto;
  uint16_t* rounded = nullptr;  // instead of `out`, to C in bfloat16; of registers tmm alone

  PanelSums from_row(ptrdiff_t row) const {
    if (kTmm && rounded != nullptr) {
      return {nullptr, stride, before.from_row(row), onto.from_row(row), rounded + row * stride};
    }
    return {out + row * stride, stride, before.from_row(row), onto.from_row(row)};
  }
};

// Rows of A or columns of B that will be read soon, `count` of them, row_bytes apart.
struct LinesAhead {
  const char* data = nullptr;
  ptrdiff_t row_bytes = 0;
  int64_t count = 0, word_bytes = sizeof(float);

  LinesAhead part(int64_t first, int64_t num) const {
    const int64_t left = count - first;
    return {data + first * row_bytes, row_bytes, left < num ? left : num, word_bytes};
  }
};

// Lines of C that sums of panels go to, of each row from `data` up to the byte `width` behind it. They are asked for while these
// are made.
struct LinesOfC {
  const char* data = nullptr;
  ptrdiff_t row_bytes = 0, width = 0;
};

// A panel's `columns` columns, or those of two whole panels `apart`, and what comes after them: packed, or columns of B.
struct Panels {
  const float *data = nullptr, *next = nullptr;
  ptrdiff_t apart = 0;
  int64_t columns = 0;
  LinesAhead source;
};

// What a tile's rows need before they are multiplied with the first panel: nothing, where they are packed.
struct Packed {
  LinesAhead operator()(int64_t /*tile*/) const { return {}; }
};

#ifndef POLYHEAD_HAS_TMM  // else gemm_tmm.h has what follows

// What will be read soon: step_lines cache lines from `panel` on are asked for, into L2, while kStepWords words are multiplied, and
// so on; likewise as many words of rows of A and of columns of B; and step_c of C's rows, which are written then.
struct Ahead {
  const float* panel;
  int step_lines;
  LinesAhead a, b;
  LinesOfC c;
  int step_c, rows_of_c;
};
constexpr int kStepWords = 16, kLineFloats = 16, kLineBytes = 4 * kLineFloats;

// The same vectors of two panels, as one operand of a microkernel.
struct TwoPanels {
  const float* first;
  ptrdiff_t apart;

  TwoPanels operator+(ptrdiff_t floats) const { return {first + floats, apart}; }
};
inline const float* vector_at(const TwoPanels& x, int v) {
  return x.first + (v < kPanelVecs ? v * kLanes : x.apart + (v - kPanelVecs) * kLanes);
}

inline __attribute__((always_inline)) void ask(const LinesAhead& lines, int64_t word) {
  for (int64_t r = 0; r < lines.count; ++r) {
    __builtin_prefetch(lines.data + word * lines.word_bytes + r * lines.row_bytes, 0, 2);
  }
}

// acc[r] = sums over words of A[r][word] panel[word][...].
template <class Mac, bool kAlong, class Panel, int kRows, int kVecs_>
inline __attribute__((always_inline)) void sum_words(F (&acc)[kRows][kVecs_], const float* a, const Panel& panel,
                                                     int64_t words, const Ahead& ahead) {
  constexpr ptrdiff_t kStride = kAlong ? kRowStride : kTileRows;
  clear(acc);
  const float* next = ahead.panel;
  const char* c = ahead.c.data;
  int rows_of_c = ahead.rows_of_c;
  int64_t word = 0;
  for (; word + kStepWords <= words; word += kStepWords) {
    for (int i = 0; i < ahead.step_lines; ++i) __builtin_prefetch(next + i * kLineFloats, 0, 2);
    next += ahead.step_lines * kLineFloats;
    for (int i = 0; i < ahead.step_c && rows_of_c > 0; ++i, --rows_of_c, c += ahead.c.row_bytes) {
      for (ptrdiff_t at = 0; at < ahead.c.width; at += kLineBytes) __builtin_prefetch(c + at, 1, 2);
      __builtin_prefetch(c + ahead.c.width, 1, 2);
    }
    if (ahead.a.count + ahead.b.count > 0) {  // at most steps there are none
      ask(ahead.a, word);
      ask(ahead.b, word);
    }
    contract<Mac, kAlong>(acc, panel + word * kColumns, kColumns, a + word * (kAlong ? 1 : kTileRows), kStride,
                          kStepWords);
  }
  contract<Mac, kAlong>(acc, panel + word * kColumns, kColumns, a + word * (kAlong ? 1 : kTileRows), kStride,
                        words - word);
}

// The vectors of acc from kFirst on, as many as `to` has.
template <int kFirst, int kCount, int kRows, int kVecs_>
inline __attribute__((always_inline)) void store_sums(F (&acc)[kRows][kVecs_], const PanelSums& to) {
  const auto add = [&](const Onto& onto) __attribute__((always_inline)) {
    if (onto.data == nullptr) return;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kCount; ++v) {
        acc[r][kFirst + v] = acc[r][kFirst + v] + load(onto.data + r * onto.stride + v * kLanes);
      }
    }
  };
  add(to.before);
  add(to.onto);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kCount; ++v) store(to.out + r * to.stride + v * kLanes, acc[r][kFirst + v]);
  }
}

// Sums of kRows rows and kVecs_ vectors of a panel. Within its caller GCC would keep one of the sums in memory.
template <class Mac, bool kAlong, int kRows, int kVecs_>
__attribute__((noinline)) void multiply(const PanelSums& to, const float* a, const float* panel, int64_t words,
                                        const Ahead& ahead) {
  F acc[kRows][kVecs_];
  sum_words<Mac, kAlong>(acc, a, panel, words, ahead);
  store_sums<0, kVecs_>(acc, to);
}

// Sums of kRows rows and two whole panels. Six take 10 loads for 24 multiply-adds where twelve of one panel take 14, and some
// cores load little more than a vector a cycle: Xeon, family 6 model 106, 2026-11-26, one thread, float32, packed weights,
// GFLOP/s of 165 at [384, 1024] x [1024, 1024]: 140 and 160; [64, 1024] 144 and 173.
template <class Mac, bool kAlong, int kRows>
__attribute__((noinline)) void multiply_two(const PanelSums& to, const PanelSums& to_second, const float* a,
                                            const TwoPanels& panels, int64_t words, const Ahead& ahead) {
  F acc[kRows][2 * kPanelVecs];
  sum_words<Mac, kAlong>(acc, a, panels, words, ahead);
  store_sums<0, kPanelVecs>(acc, to);
  store_sums<kPanelVecs, kPanelVecs>(acc, to_second);
}

// Calls work.template operator()<kRows>() as long as there are as many rows left.
template <int kRows, class Work>
inline __attribute__((always_inline)) void take_rows(int& rows, const Work& work) {
  for (; rows >= kRows; rows -= kRows) work.template operator()<kRows>();
}

// The rows of one tile against a panel.
template <class Mac, bool kAlong, int kVecs_>
void multiply_tile(PanelSums to, const float* a, const float* panel, int64_t words, int rows, const Ahead& ahead) {
  const auto take = [&]<int kRows>() {
    multiply<Mac, kAlong, kRows, kVecs_>(to, a, panel, words, ahead);
    to = to.from_row(kRows);
    a += kRows * (kAlong ? kRowStride : 1);
  };
  take_rows<kTileRows>(rows, take);
  if constexpr (kTileRows > 8) take_rows<8>(rows, take);
  take_rows<4>(rows, take);
  take_rows<2>(rows, take);
  take_rows<1>(rows, take);
}

// The same against two panels; the second six rows ask for what follows the second panel, and for as many columns of B again.
template <class Mac, bool kAlong>
void multiply_tile_by_two(PanelSums to, PanelSums to_second, const float* a, const TwoPanels& panels, int64_t words,
                          int rows, Ahead ahead) {
  const auto take = [&]<int kRows>() {
    multiply_two<Mac, kAlong, kRows>(to, to_second, a, panels, words, ahead);
    to = to.from_row(kRows), to_second = to_second.from_row(kRows);
    a += kRows * (kAlong ? kRowStride : 1);
    if (ahead.panel != nullptr) ahead.panel += panels.apart;
    ahead.b.data += ahead.b.count * ahead.b.row_bytes;
    ahead.a = {}, ahead.rows_of_c = 0;
  };
  if (rows != 8) take_rows<6>(rows, take);  // 4 + 4 take fewer loads than 6 + 2
  take_rows<4>(rows, take);
  take_rows<2>(rows, take);
  take_rows<1>(rows, take);
}

// All rows of a task against `panels`. prepare(tile) comes before each tile and tells which rows to ask for beside it. The next
// panel is asked for, too: the hardware does not follow the jump.
template <class Mac, bool kAlong, class Prepare>
void multiply_panels(const PanelSums (&to)[2], const LinesOfC& c, const float* a, const Panels& panels, int64_t words,
                     int64_t rows, const Prepare& prepare) {
  constexpr int64_t kNextTile = kAlong ? kTileRows * kRowStride : kTileStride;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows, steps = words / kStepWords;
  const int64_t lines =
      (kStepWords * kColumns / kLineFloats + tiles - 1) / tiles;  // of the panel's next kStepWords words
  const int step_c = steps == 0 ? 0 : static_cast<int>((kTileRows + steps - 1) / steps);
  const int64_t halves = panels.columns > kColumns ? 2 : 1;
  const int64_t columns = (panels.source.count + halves * tiles - 1) / (halves * tiles);  // of B, asked for at a time
  for (int64_t tile = 0; tile < tiles; ++tile, a += kNextTile) {
    const int64_t row = tile * kTileRows, left = rows - row;
    const int count = left < kTileRows ? static_cast<int>(left) : kTileRows;
    const LinesAhead rows_of_a = prepare(tile);
    const bool next_panel = panels.next != nullptr && tiles > 2;
    Ahead ahead{next_panel ? panels.next + tile * steps * lines * kLineFloats : nullptr,
                next_panel ? static_cast<int>(lines) : 0,
                rows_of_a,
                panels.source.part(halves * tile * columns, columns),
                c,
                step_c,
                c.data == nullptr ? 0 : kTileRows};
    ahead.c.data += row * c.row_bytes;
    const PanelSums to_tile = to[0].from_row(row);
    if (panels.columns > kColumns) {
      if constexpr (kPairs) {
        multiply_tile_by_two<Mac, kAlong>(to_tile, to[1].from_row(row), a, {panels.data, panels.apart}, words, count,
                                          ahead);
      }
    } else if (panels.columns <= kLanes) {
      multiply_tile<Mac, kAlong, 1>(to_tile, a, panels.data, words, count, ahead);
    } else {
      multiply_tile<Mac, kAlong, kPanelVecs>(to_tile, a, panels.data, words, count, ahead);
    }
  }
}

#endif

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
