// Rows that will be read or written soon, asked for line by line while something else is computed: a burst of them would
// wait for memory as the rows themselves do.
#pragma once

#include "cpu/isa/rows.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

class RowsAhead {
 public:
  void clear() { count_ = at_ = 0, byte_ = 0, row_ = nullptr; }

  void add(const Rows& x, int64_t first_row, int64_t num_rows, int64_t columns) {
    if (at_ == count_) clear();
    const int64_t bytes = numbers_bytes(x.dtype, columns);
    if (count_ == kMost || x.data == nullptr || x.column_stride != 1 || num_rows <= 0 || bytes <= 0) return;
    const bool one = x.apart == nullptr && x.row_bytes == bytes;  // row after row: as one
    range_[count_++] = {x.from(first_row, 0), 0, one ? 1 : num_rows, one ? num_rows * bytes : bytes};
  }

  // What add() added is shared out among products of so many units together.
  void share_out(int64_t units) {
    int64_t lines = 0;
    for (int i = at_; i < count_; ++i) lines += (range_[i].end - range_[i].next) * ((range_[i].bytes + 63) / 64);
    share_out(lines, units);
  }
  // Among any products, so many lines for so many units.
  void share_out(int64_t lines, int64_t units) {
    rate_ = (lines * kOne + units - 1) / units;
    due_ = 0;
  }

  // The share of a product of so many units: nothing, until some lines are due, for to ask in a product costs it some steps.
  __attribute__((always_inline)) inline Lines lines(int64_t units) {
    if (at_ == count_) return {};
    due_ += units * rate_;
    const int64_t most = units / kUnitsOfLine;
    if (due_ < (most < kLeastLines ? most : kLeastLines) * kOne) return {};
    return take_due(most < kMostLines ? most : kMostLines);
  }

  // Asks for the share of so many units at once, as whole lines: as many each time, until all have been asked for, because a
  // branch that is guessed wrong costs registers of 16 x 16 words more than a line that comes early.
  __attribute__((always_inline)) inline void ask(int64_t units) {
    const int64_t lines = (units * rate_ + kOne - 1) / kOne;
    for_next_lines(
        lines < kMostLines ? lines : kMostLines,
        [](const char* line) __attribute__((always_inline)) { __builtin_prefetch(line, 0, 2); });
  }

  void ask_all() {
    while (at_ < count_) take(kMostLines).ask();
  }

 private:
  static constexpr int kMost = 2 * kForwardTiles + 8;  // mask and bias of each tile, and what a block asks for besides
  static constexpr int64_t kLeastLines = 8, kMostLines = 64, kOne = 1 << 16;
  struct Range {
    Rows x;
    int64_t next, end, bytes;
  };

  __attribute__((noinline)) Lines take_due(int64_t most) {
    const int64_t due = due_ / kOne;
    due_ %= kOne;
    return take(due < most ? due : most);
  }

  // The next lines, at most n.
  Lines take(int64_t n) {
    const char** line = line_;
    for_next_lines(
        n, [&](const char* x) __attribute__((always_inline)) { *line++ = x; });
    return {line_, line};
  }

  template <class Use>
  __attribute__((always_inline)) inline void for_next_lines(int64_t n, const Use& use) {
    if (at_ == count_) return;
    const char* row = row_ != nullptr ? row_ : row_of_next();
    int64_t byte = byte_;
    for (; n > 0; --n) {
      use(row + byte);
      byte += 64;
      Range& range = range_[at_];
      if (byte < range.bytes) continue;
      byte = 0;
      if (++range.next == range.end && ++at_ == count_) break;
      row = range.next < range.end && range.x.apart == nullptr ? row + range.x.row_bytes : row_of_next();
    }
    row_ = row, byte_ = byte;
  }

  __attribute__((noinline)) const char* row_of_next() const { return range_[at_].x.row(range_[at_].next); }

  Range range_[kMost];
  int count_ = 0, at_ = 0;
  int64_t byte_ = 0;            // of the next row, up to which it has been asked for
  const char* row_ = nullptr;   // that row; null: not looked up yet
  int64_t rate_ = 0, due_ = 0;  // lines times kOne: of a unit, and not yet asked for
  const char* line_[kMostLines];
};

inline Lines Asking::lines(int64_t units) const { return ahead == nullptr ? Lines{} : ahead->lines(units); }
inline void Asking::ask(int64_t units) const {
  if (ahead != nullptr) ahead->ask(units);
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
