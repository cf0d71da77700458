// What one head does to its products, and to the gradients of its scores: every kernel asks this, and this the options.
#pragma once

#include "cpu/attention/score/options.h"
#include "cpu/attention/score/ranges.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// How one tile sees one block of keys.
struct BlockView {
  int64_t first_query, first_key;
  const BlockRanges* ranges = nullptr;      // null: every query sees every key, up to what options hide
  const uint16_t (*kept)[kVecs] = nullptr;  // by dropout, [key][vector]; null: all
  const float* program_scores = nullptr;    // [key][query]: -inf hides, once the program has run; null: it has no score
  Options::View options;

  TilePlace at(int key, int lane) const { return {first_query, first_key, key, lane}; }
};

inline const ProgramMemory& program_memory(const Options::Memory& memory) {
  return memory_of<ProgramMask, Options>(memory).program;
}

// How products become scores: they are them, but for a factor; in registers, by a scale and one option at most; or each by what
// all options, ranges and the program say. The last is right for all.
enum class ScoreWay { kProducts, kMaskAndBias, kAlibi, kAny };

struct Score {
  // The scale is applied to products, not to exponents: options, sinks or weights want scores, or it is not positive.
  bool scaled_first;
  float scale;
  float to_natural;  // what a score, as computed, is multiplied by to be the contract's,
  float to_log2;     // and to be a power of 2; positive
  Options options;
  bool by_program;  // options' scores are not yet the contract's: the program runs on them, tile by tile

  Score(const Problem& problem, const Sequence& sequence, int64_t b, int64_t h)
      : scale(problem.scale), options(problem, sequence, b, h) {
    by_program = problem.program.code != nullptr && problem.program.code->score >= 0;
    scaled_first = options.on() || by_program || problem.sinks != nullptr || !problem.softmax || !(scale > 1e-6f);
    to_natural = scaled_first ? 1.0f : scale;
    to_log2 = scaled_first ? kLog2E : scale * kLog2E;
  }

  // A product -> a score, at any place.
  template <class Place>
  F of(F product, const Place& at, const Options::View& view, Options::Kept& kept) const {
    return scaled_first ? options.score(product * broadcast(scale), at, view, kept) : product;
  }

  // Which of the kLanes queries from `lane` on see a key of a block.
  M sees(const BlockView& view, int key, int lane) const {
    const M seen = seen_by_program(view, key, lane);
    if (view.program_scores == nullptr) return seen;
    return both(seen, negate(equal(load(view.program_scores + key * kTile + lane), broadcast(-kInfinity))));
  }
  template <ScoreWay kWay>
  M sees(const BlockView& view, int key, int lane) const {
    if constexpr (kWay == ScoreWay::kAny) {
      return sees(view, key, lane);
    } else {
      const MaskAndBias::View& own = view_of<MaskAndBias>(options, view.options);
      return option<MaskAndBias>(options).sees(mask_from_bits(~0u), view.at(key, lane), own);
    }
  }

  ScoreWay way(const BlockView& view) const {
    if (by_program || view.ranges != nullptr) return ScoreWay::kAny;
    if (!scaled_first) return ScoreWay::kProducts;
    if (options.template only<MaskAndBias>()) return ScoreWay::kMaskAndBias;
    return options.template only<Alibi>() ? ScoreWay::kAlibi : ScoreWay::kAny;
  }
  // Calls work.operator()<kWay>(): kernels are functions of their own for each, which leaves the others as fast as they are.
  template <class Work>
  void with_way(const BlockView& view, const Work& work) const {
    switch (way(view)) {
      case ScoreWay::kProducts: return work.template operator()<ScoreWay::kProducts>();
      case ScoreWay::kMaskAndBias: return work.template operator()<ScoreWay::kMaskAndBias>();
      case ScoreWay::kAlibi: return work.template operator()<ScoreWay::kAlibi>();
      default: return work.template operator()<ScoreWay::kAny>();
    }
  }

  bool hides(const BlockView& view) const { return view.program_scores != nullptr || hides_from_program(view); }

  // The same before the program's score: which keys come to that.
  M seen_by_program(const BlockView& view, int key, int lane) const {
    return options.sees(in_range(view, key, lane), view.at(key, lane), view.options);
  }
  bool hides_from_program(const BlockView& view) const { return view.ranges != nullptr || options.hides(view.options); }
  bool hidden(const BlockView& view, int key, int query) const {
    return (bits(sees(view, key, query / kLanes * kLanes)) >> (query % kLanes) & 1) == 0;
  }

  // Whether options leave query i a key of its range, or of the sinks beside it: one whose score is -inf. Of a program's,
  // that hides.
  bool leaves_a_key(const Band& band, const KeyRange& range, int64_t i) const {
    return !by_program && (leaves_one_of(range, i) || leaves_one_of({0, sinks_end(band, range)}, i));
  }
  bool leaves_one_of(const KeyRange& range, int64_t i) const {
    Options::View view;
    options.look_row(view, i, range.begin);
    for (int64_t k = range.begin; k < range.end; k += kLanes) {
      const int n = range.end - k < kLanes ? static_cast<int>(range.end - k) : kLanes;
      if (any(options.sees(mask_from_bits((1u << n) - 1), RowPlace{i, k, 0, n}, view))) return true;
    }
    return false;
  }

  // Products of a piece of a tile -> scores, -inf where hidden. s[r][v]: key + r, lanes lane + v * kLanes.
  template <ScoreWay kWay, int kRows, int kVecs_>
  __attribute__((always_inline)) void apply(F (&s)[kRows][kVecs_], const BlockView& view, int key, int lane) const {
    if constexpr (kWay == ScoreWay::kAny) {
      F x[kRows][kVecs_];  // s itself stays in registers: its address is not taken
      copy(x, s);
      for_each_score(x, view, key, lane, [](const Options::Kept&, int, int) {});
      copy(s, x);
    } else {
      apply_in_registers<kWay>(s, view, key, lane);
    }
  }

  // The same in backward, where options keep what their gradients need.
  template <ScoreWay kWay, int kRows, int kVecs_>
  __attribute__((always_inline)) void apply_and_keep(F (&s)[kRows][kVecs_], const BlockView& view, int key, int lane,
                                                     const Options::Memory& memory) const {
    if constexpr (kWay == ScoreWay::kAny) {
      F x[kRows][kVecs_];  // as in apply()
      copy(x, s);
      apply_each_and_keep(x, view, key, lane, memory);
      copy(s, x);
    } else {
      apply_in_registers<kWay>(s, view, key, lane);
    }
  }

  // dS of the scores -> dS of what option O gave: what O adds to the gradients of its own.
  template <class O>
  F gradient_after(F ds, const BlockView& view, int key, int lane, const Options::Memory& memory) const {
    Options::Kept kept;
    options.load_kept(kept, memory, key * kTile + lane);
    return options.gradient_after<O>(ds, view.at(key, lane), view.options, kept);
  }

  // dS of the scores -> dS of the products but for `scale`, of the block at hand.
  F raw_gradient(F ds, const BlockView& view, int key, int lane, const Options::Memory& memory) const {
    if (!scaled_first) return ds;
    Options::Kept kept;
    options.load_kept(kept, memory, key * kTile + lane);
    return options.raw_gradient(ds, view.at(key, lane), view.options, kept);
  }

  // What the program computes once for keys [begin, end) of a block, before it runs on some of them or all.
  void prepare_program(const BlockView& view, const Options::Memory& memory, int begin, int end) const {
    prepare_score(of_program().call, place(view), program_memory(memory), begin, end);
  }
  // Scores of the options in memory.scores -> the contract's in memory.results, of keys [begin, end) of a block.
  void run_program(const BlockView& view, const Options::Memory& memory, int begin, int end) const {
    run_score(of_program().call, place(view), program_memory(memory), begin, end);
  }
  // Of those results, memory.gradients -> dS of the options' scores; and what they give to captures.
  void prepare_gradients_of_program(const BlockView& view, const Options::Memory& memory, int begin, int end,
                                    bool captures) const {
    prepare_gradients(of_program().call, place(view), program_memory(memory), begin, end, captures);
  }
  void differentiate_program(const BlockView& view, const Options::Memory& memory, int begin, int end,
                             const CaptureSums& captures) const {
    run_gradients(of_program().call, place(view), program_memory(memory), begin, end, captures);
  }
  bool changes_gradient() const { return by_program && !of_program().call.code->same_gradient; }

 private:
  ProgramPlace place(const BlockView& view) const {
    return {of_program().b, of_program().h, of_program().offset, view.first_query, view.first_key};
  }
  const ProgramMask& of_program() const { return option<ProgramMask>(options); }

  template <ScoreWay kWay, int kRows, int kVecs_>
  __attribute__((always_inline)) void apply_in_registers(F (&s)[kRows][kVecs_], const BlockView& view, int key,
                                                         int lane) const {
    if constexpr (kWay == ScoreWay::kMaskAndBias) {
      option<MaskAndBias>(options).apply(s, scale, view_of<MaskAndBias>(options, view.options), key, lane);
    } else if constexpr (kWay == ScoreWay::kAlibi) {
      option<Alibi>(options).apply(s, scale, view_of<Alibi>(options, view.options), key, lane);
    }
  }
  template <int kRows, int kVecs_>
  __attribute__((always_inline)) static void copy(F (&to)[kRows][kVecs_], const F (&from)[kRows][kVecs_]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs_; ++v) to[r][v] = from[r][v];
    }
  }
  // Not inline: in backward's kernels it would stand twice.
  template <int kRows, int kVecs_>
  __attribute__((noinline)) void apply_each_and_keep(F (&s)[kRows][kVecs_], const BlockView& view, int key, int lane,
                                                     const Options::Memory& memory) const {
    const bool some_hidden = hides_from_program(view);
    for_each_score(s, view, key, lane, [&](const Options::Kept& kept, int k, int at) {
      options.save(kept, memory, k * kTile + at,
                   [&] { return some_hidden ? seen_by_program(view, k, at) : mask_from_bits(~0u); });
    });
  }

  static M in_range(const BlockView& view, int key, int lane) {
    if (view.ranges == nullptr) return mask_from_bits(~0u);
    const I index = broadcast_int(key);
    const M before_end = less_int(index, load_int(view.ranges->end + lane));
    if (key < view.ranges->sinks) return before_end;
    return both(before_end, negate(less_int(index, load_int(view.ranges->begin + lane))));
  }

  template <int kRows, int kVecs_, class Keep>
  void for_each_score(F (&s)[kRows][kVecs_], const BlockView& view, int key, int lane, const Keep& keep) const {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs_; ++v) {
      const int at = lane + v * kLanes;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        Options::Kept kept;
        F x = of(s[r][v], view.at(key + r, at), view.options, kept);
        keep(kept, key + r, at);
        if (view.ranges != nullptr) x = select(in_range(view, key + r, at), x, broadcast(-kInfinity));
        s[r][v] = x;
      }
    }
  }
};

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
