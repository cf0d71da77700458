// What linear::Epilogue does to a row of a product, or of a given matrix.
#pragma once

#include "cpu/isa/philox.h"
#include "cpu/linear/activation.h"
#include "cpu/linear/line.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Columns whose random numbers are made at once: kLanes counters of 8 columns.
constexpr int kDropoutColumns = 8 * kLanes;

// Bit c of byte r becomes bit r of byte c.
inline uint64_t transpose_bits(uint64_t x) {
  uint64_t t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AA;
  x ^= t ^ (t << 7);
  t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCC;
  x ^= t ^ (t << 14);
  t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0;
  return x ^ t ^ (t << 28);
}

// Which of kDropoutColumns columns of a row, from `column` (a multiple of 8) on, dropout keeps.
struct Kept {
  uint8_t bits[(kDropoutColumns < 64 ? 8 : kDropoutColumns / 8) + 2];

  M mask(int column) const {  // of kLanes columns, counted from the first
    const uint8_t* const at = bits + column / 8;
    const uint32_t columns = at[0] | uint32_t{at[1]} << 8 | uint32_t{at[2]} << 16;
    return mask_from_bits(columns >> (column % 8) & ((1u << kLanes) - 1));
  }
};

inline void keep_columns(Kept& kept, const EpilogueWork& e, int64_t row, int64_t column) {
  const I threshold = broadcast_int(static_cast<int32_t>(e.dropout.threshold));
  const PhiloxWords random = philox({{broadcast_int(static_cast<int32_t>(row / e.dropout_rows)),
                                      broadcast_int(static_cast<int32_t>(row % e.dropout_rows)),
                                      add_int(broadcast_int(static_cast<int32_t>(column / 8)), iota()),
                                      broadcast_int(static_cast<int32_t>(e.dropout.offset))}},
                                    e.dropout.seed);
  uint32_t lanes[8];  // that keep column j of their 8
  for (int w = 0; w < 4; ++w) {
    lanes[2 * w] = bits(negate(less_int(and_int(random.word[w], broadcast_int(0xffff)), threshold)));
    lanes[2 * w + 1] = bits(negate(less_int(shift_right<16>(random.word[w]), threshold)));
  }
  for (int byte = 0; byte < (kLanes + 7) / 8; ++byte) {
    uint64_t rows = 0;
    for (int j = 0; j < 8; ++j) rows |= uint64_t{lanes[j] >> (8 * byte) & 0xff} << (8 * j);
    rows = transpose_bits(rows);
    __builtin_memcpy(kept.bits + 8 * byte, &rows, 8);
  }
}

// The operands of one row, and where it goes.
struct EpilogueRow {
  Line bias, pre_activation, residual;
  Line out;                 // data is null: not written
  bool accumulate = false;  // add to `out`
  float* sums = nullptr;    // [columns in whole vectors], counted as the columns: what is written is added
};

inline EpilogueRow epilogue_row(const EpilogueWork& e, const Matrix& out, int64_t row, bool accumulate) {
  return {row_of(e.bias, 0), row_of(e.pre_activation, row), row_of(e.residual, row), row_of(out, row), accumulate};
}

// Elements [at, at + n), n <= kLanes, of which dropout keeps `kept`.
inline F epilogue_step(const EpilogueWork& e, const EpilogueRow& line, F x, int64_t at, int n, bool drops, M kept) {
  const bool activates = e.activation != linear::Activation::kNone;
  const F scale = broadcast(e.dropout.scale), zero = broadcast(0.0f);
  if (line.bias.data != nullptr) x = x + load_line(line.bias, at, n);
  if (e.gradient) {
    if (drops) x = select(kept, x * scale, zero);
    if (activates) x = x * activation_derivative(e.activation, load_line(line.pre_activation, at, n));
  } else {
    if (line.pre_activation.data != nullptr) store_line(line.pre_activation, at, x, n);
    if (activates) x = activate(e.activation, x);
    if (drops) x = select(kept, x * scale, zero);
  }
  if (line.residual.data != nullptr) x = x + load_line(line.residual, at, n);
  return x;
}

// Columns [first, end) of row `row`, whose elements source(column, n) gives.
template <class Source>
void finish_row(const EpilogueWork& e, const EpilogueRow& line, int64_t row, int64_t first, int64_t end,
                const Source& source) {
  const bool drops = e.dropout.threshold != 0;
  Kept kept = {};
  for (int64_t stretch = first - first % 8; stretch < end; stretch += kDropoutColumns) {
    if (drops) keep_columns(kept, e, row, stretch);
    const int64_t stretch_end = end - stretch < kDropoutColumns ? end : stretch + kDropoutColumns;
    for (int64_t at = stretch < first ? first : stretch; at < stretch_end; at += kLanes) {
      const int n = stretch_end - at < kLanes ? static_cast<int>(stretch_end - at) : kLanes;
      F x = epilogue_step(e, line, source(at, n), at, n, drops, kept.mask(static_cast<int>(at - stretch)));
      if (line.sums != nullptr) store(line.sums + at, load(line.sums + at) + x);
      if (line.out.data == nullptr) continue;
      if (line.accumulate) x = x + load_line(line.out, at, n);
      store_line(line.out, at, x, n);
    }
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
