// S = S - slope * |i + offset - j|.
#pragma once

#include "cpu/attention/score/option.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

struct Alibi : Option {
  bool given;
  float slope = 0;
  double offset;  // may be any int64: positions are summed in double

  struct View {
    const float* positions = nullptr;  // of a tile's queries, counted from the block's first key
    float position = 0;                // of a row
  };
  struct Memory {
    alignas(64) float positions[kTile];
  };

  Alibi(const Problem& problem, const Sequence& sequence, int64_t b, int64_t h)
      : given(problem.slopes != nullptr), offset(static_cast<double>(sequence.offset)) {
    if (given) slope = problem.slopes[b * problem.slopes_stride_b + h * problem.slopes_stride_h];
  }

  bool on() const { return given; }

  bool look(View& view, Memory& own, const Queries& queries, const Keys& keys) const {
    if (!given) return true;
    const double first = offset + static_cast<double>(queries.first - keys.first);
    for (int q = 0; q < kTile; ++q) own.positions[q] = static_cast<float>(first + q);
    view.positions = own.positions;
    return true;
  }
  void look_row(View& view, int64_t query, int64_t first_key) const {
    view.position = static_cast<float>(offset + static_cast<double>(query - first_key));
  }

  F distance(const TilePlace& at, const View& view) const {
    return absolute(load(view.positions + at.lane) - broadcast(static_cast<float>(at.key)));
  }
  F distance(const RowPlace& at, const View& view) const {
    return absolute(broadcast(view.position) - to_float(add_int(broadcast_int(at.key), iota())));
  }
  F distance(const HeadsPlace&, const View&) const { return broadcast(0.0f); }  // tiny_takes refuses slopes

  F score(F s, const auto& at, const View& view, Kept&) const {
    return given ? s - broadcast(slope) * distance(at, view) : s;
  }

  template <int kRows, int kVecs_>
  __attribute__((always_inline)) void apply(F (&s)[kRows][kVecs_], float scale, const View& view, int key,
                                            int lane) const {
    for_each_product_of(
        s, scale, [&](F x, int r, int v) __attribute__((always_inline)) {
          return x - broadcast(slope) * distance(TilePlace{0, 0, key + r, lane + v * kLanes}, view);
        });
  }

  // What a score with gradient ds gives to the slope's.
  F slope_gradient(F ds, const TilePlace& at, const View& view) const {
    return broadcast(0.0f) - ds * distance(at, view);
  }
};

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
