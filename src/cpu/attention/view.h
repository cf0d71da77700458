// What a tile of queries sees of a block of keys, and in which parts that is computed: forward and backward alike.
#pragma once

#include "cpu/attention/functions.h"
#include "cpu/attention/score/dropout.h"
#include "cpu/attention/score/policy.h"
#include "cpu/isa/rows_ahead.h"
#ifdef POLYHEAD_HAS_TMM
#include "cpu/isa/tmm_products.h"
#endif

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

struct QueryTile {
  TileRanges ranges;
  int64_t first_query;
  int num_queries;

  Queries queries() const { return {first_query, num_queries}; }
};

struct ViewMemory {
  Options::Memory options;
  BlockRanges ranges;
  uint16_t kept[kBlock][kVecs];
};

// Which of a block's keys, or of a tile's queries, hold numbers that products of planes are not right for (planes.h).
struct Wild {
  bool any = false;
  uint64_t rows[kBlock / 64] = {};

  bool row(int r) const { return (rows[r / 64] >> (r % 64) & 1) != 0; }
};

// The keys and values of one block, as words that the microkernel can read: in place, or copied.
struct KeyBlock {
  int64_t first;
  int num_keys;
  Words key, value;
  Wild wild = {};  // of its keys
};

// One head of one sequence, and what is done to its scores.
struct HeadOptions {
  const Problem& problem;
  const Sequence& sequence;
  int64_t b, h;
  Score score;
  ViewMemory* view_memory;

  HeadOptions(const Problem& p, const Sequence& s, int64_t b_, int64_t h_, ViewMemory* scratch)
      : problem(p), sequence(s), b(b_), h(h_), score(p, s, b_, h_), view_memory(scratch) {}
};

// The first keys that the next task sees, `most` of them, and what is added to the scores of its first tile.
inline void add_keys_ahead(RowsAhead& ahead, const Problem& problem, const NextRows& next, int64_t most = kBlock) {
  const Sequence& s = next.sequence;
  const int64_t queries = next.num_queries < kTile ? next.num_queries : kTile, kv_head = next.h / problem.group;
  const KeyRange seen = key_range(problem.band, s, next.first_query);
  const int64_t first = sinks_end(problem.band, seen) > 0 ? 0 : seen.begin / kBlock * kBlock;
  const int64_t left = s.len_k - first, keys = left < most ? left : most;
  if (queries <= 0 || keys <= 0) return;
  if (next.other_keys) {
    ahead.add(key_rows_of(problem.key, next.b, kv_head, s.first_k, s.len_k).in_place(first, keys), 0, keys,
              problem.head_dim);
    ahead.add(key_rows_of(problem.value, next.b, kv_head, s.first_k, s.len_k).in_place(first, keys), 0, keys,
              problem.head_dim_v);
  }
  Options(problem, s, next.b, next.h)
      .add_ahead(ahead, {next.first_query, static_cast<int>(queries)}, {first, first + keys});
}

// Whether a tile may see some key of [begin, end), up to what options hide.
inline bool sees(const QueryTile& tile, int64_t begin, int64_t end) {
  return (tile.ranges.any_begin < end && tile.ranges.any_end > begin) || begin < tile.ranges.sinks;
}

// The first key of the next block, from the one that starts at `first` on, that some of the tiles may see; `end` or more:
// there is none below `end`.
template <class Tile>
int64_t next_block(const HeadOptions& head, const Tile* tiles, int num_tiles, int64_t first, int64_t end) {
  const auto some_see = [&](int64_t begin, int64_t behind) {
    const int64_t last = behind < head.sequence.len_k ? behind : head.sequence.len_k;
    for (int t = 0; t < num_tiles; ++t) {
      if (sees(tiles[t], begin, behind) && head.score.options.may_see(tiles[t].queries(), {begin, last})) return true;
    }
    return false;
  };
  // Where a block is hidden, twice as many are asked next, and half as many where some of them are seen.
  for (int64_t blocks = 1; first < end && (blocks > 1 || !some_see(first, first + kBlock));) {
    if (blocks > 1 && some_see(first, first + blocks * kBlock)) {
      blocks /= 2;
      continue;
    }
    first += blocks * kBlock;
    blocks *= 2;
  }
  return first;
}

// Keys [begin, end), multiples of kPartKeys but for the block's last, as the vectors [v_begin, v_end) see them; the other
// vectors see none.
struct Part {
  int begin = 0, end = 0, v_begin = 0, v_end = 0;
  bool all = true;  // every query sees every key, up to options

  bool continues(const Part& before) const {
    return begin == before.end && v_begin == before.v_begin && v_end == before.v_end && all == before.all;
  }
};

// What a tile sees of a block, and in which parts it is computed.
struct TileView {
  BlockView view;
  int begin = 0, end = 0;  // keys that some query may see; empty: none
  bool all = true;         // every query sees every key, up to options
  int num_vecs = 0;
  int end_of_parts = 0;  // of the block's keys
};

// Leaves out, for each vector, the keys before the first and behind the last that a program's mask shows it.
inline void narrow_to_seen(TileView& t, const uint16_t (*seen)[kTileQueries / 4], BlockRanges& ranges) {
  int begin = t.end, end = t.begin;
  for (int v = 0; v < t.num_vecs; ++v) {
    int first = t.begin, behind = t.end;
    while (first < behind && seen[first][v] == 0) ++first;
    while (behind > first && seen[behind - 1][v] == 0) --behind;
    if (ranges.vec_begin[v] < first) ranges.vec_begin[v] = first;
    if (ranges.vec_end[v] > behind) ranges.vec_end[v] = behind;
    if (ranges.vec_begin[v] < begin) begin = ranges.vec_begin[v];
    if (ranges.vec_end[v] > end) end = ranges.vec_end[v];
  }
  t.begin = begin;
  t.end = begin < end ? end : begin;
}

// Whether every query of a tile sees all keys of a block, up to what options hide.
inline bool sees_all(const TileRanges& ranges, int64_t first_key, int num_keys) {
  return ranges.all_begin <= first_key && ranges.all_end >= first_key + num_keys && end_of_parts(num_keys) == num_keys;
}

inline TileView view_block(const HeadOptions& head, const QueryTile& tile, int64_t first_key, int num_keys) {
  const TileRanges& ranges = tile.ranges;
  ViewMemory& scratch = *head.view_memory;
  TileView t;
  t.end_of_parts = end_of_parts(num_keys);
  const int sinks = clamp_to_block(ranges.sinks, first_key, num_keys);
  t.begin = sinks > 0 ? 0 : clamp_to_block(ranges.any_begin, first_key, kBlock);
  t.end = clamp_to_block(ranges.any_end, first_key, num_keys);
  if (sinks > t.end) t.end = sinks;
  if (t.begin >= t.end) return t;
  t.num_vecs = static_cast<int>(whole(tile.num_queries, kPartLanes) / kLanes);
  t.view.first_query = tile.first_query;
  t.view.first_key = first_key;
  if (head.score.by_program) t.view.program_scores = program_memory(scratch.options).results;
  t.all = sees_all(ranges, first_key, num_keys);
  // Parts that start at groups must start where they would if a mask left out nothing, or a row's bits depended on others'.
  const bool one_part = t.all && !option<ProgramMask>(head.score.options).on();
  Keys keys{first_key, t.begin, t.end, one_part || kGroup % kNarrow == 0};
  if (!head.score.options.look(t.view.options, scratch.options, tile.queries(), keys)) {
    t.end = t.begin;
    return t;
  }
  t.begin = keys.begin, t.end = keys.end;
  if (head.problem.dropout.scale != 1.0f) {
    const int64_t head_index = head.b * head.problem.num_heads + head.h;
    dropout_tile(scratch.kept, head.problem.dropout, static_cast<uint32_t>(head_index), tile.first_query, first_key,
                 t.begin, t.end, t.num_vecs);
    t.view.kept = scratch.kept;
  }
  const auto* const seen = view_of<ProgramMask>(head.score.options, t.view.options).seen;
  if (t.all && seen == nullptr) return t;
  t.all = false;
  block_ranges(scratch.ranges, ranges, first_key, kBlock);
  t.view.ranges = &scratch.ranges;
  if (seen != nullptr) narrow_to_seen(t, seen, scratch.ranges);
  return t;
}

inline Part part_of_group(const TileView& t, int group) {
  const BlockRanges& ranges = *t.view.ranges;
  const int end = group + kGroup < t.end_of_parts ? group + kGroup : t.end_of_parts;
  Part part{group, end, t.num_vecs, 0, group >= ranges.all_begin && end <= ranges.all_end};
  if (part.begin < t.begin) part.begin = t.begin / kPartKeys * kPartKeys;
  // Whole steps where keys are left: else a query's sums would depend on how far others see.
  if (part.end > t.end) part.end = static_cast<int>(whole(t.end, kPartKeys) < end ? whole(t.end, kPartKeys) : end);
  for (int v = 0; v < t.num_vecs; ++v) {
    if (ranges.vec_begin[v] >= part.end || ranges.vec_end[v] <= part.begin) continue;
    if (v < part.v_begin) part.v_begin = v;
    part.v_end = v + 1;
  }
  if constexpr (kPartVecs > 1) {
    part.v_begin = part.v_begin / kPartVecs * kPartVecs;
    part.v_end = static_cast<int>(whole(part.v_end, kPartVecs));
  }
  return part;
}

// Calls work(part, view) for all that the tile sees of a block, keys in order.
template <class Work>
void for_each_part(const TileView& t, const Work& work) {
  if (t.all) return work(Part{t.begin, t.end, 0, t.num_vecs}, t.view);
  BlockView view_all = t.view;
  view_all.ranges = nullptr;
  const auto finish = [&](const Part& part) {
    if (part.v_begin < part.v_end) work(part, part.all ? view_all : t.view);
  };
  Part open;
  for (int group = t.begin / kGroup * kGroup; group < t.end; group += kGroup) {
    const Part part = part_of_group(t, group);
    if (part.continues(open)) {
      open.end = part.end;
      continue;
    }
    finish(open);
    open = part;
  }
  finish(open);
}

// X^T [keys][queries] = rows A^T for the keys and vectors of a part: calls take(x, key, lane) with each microkernel's
// sums, x[r][v] being key + r and the queries lane + v * kLanes on, and done(v_begin, v_end) where all keys of these vectors
// have been taken; kSums: of a microkernel. A^T [words][kTile] is a tile of queries. Meanwhile `later` may go on.
#ifdef POLYHEAD_HAS_TMM
template <class Mac, int kSums, class Take, class Done>
void for_each_product(const float* a, int64_t words, const Words& rows, const Part& part, Later& later,
                      const Take& take, const Done& done) {
  const Take own = take;  // see weigh_keys
  // Vectors of a take: with planes, six times the products wait, and too many of them at a time hide nothing (decision 0021).
  constexpr int kAtOnce = Mac::kPlanes > 1 ? 1 : kPartVecs;
  const int units = (part.end - part.begin) / kUnitKeys;
  UnitProduct<Mac> next(a, words, rows);
  alignas(64) float sums[2][kUnitKeys * kUnitLanes];
  next.start(part.begin, part.v_begin * kLanes, sums[0]);
  while (next.steps() > 0) next.step();
  int turn = 0;
  for (int v = part.v_begin; v < part.v_end; v += kPartVecs) {
    if (later.waits_for(v * kLanes)) later.finish();
    for (int unit = 0; unit < units; ++unit, turn ^= 1) {
      const bool last = unit + 1 == units;
      if (!last || v + kPartVecs < part.v_end) {
        next.start(part.begin + (last ? 0 : (unit + 1) * kUnitKeys), (last ? v + kPartVecs : v) * kLanes,
                   sums[turn ^ 1]);
      }
      take_unit<Mac, kAtOnce>(sums[turn], part.begin + unit * kUnitKeys, v * kLanes, next, later, units - unit, own);
    }
    done(v, v + kPartVecs);
  }
}
#else
// The rows that are left by microkernels go by two, or one, and vector by vector: of each width, they would be a fifth of all
// code, and 1 % faster at 17 and 49 keys.
template <class Mac, int kSums, int kVecs_, class Take>
inline void products_of_vecs(const float* a, int64_t words, const Words& rows, int begin, int end, int lane,
                             const Asking& asking, const Take& take) {
  const auto product = [&]<int kRows, int kWidth>(int64_t k, int at) __attribute__((always_inline)) {
    const Lines lines = asking.lines(words);
    F x[kRows][kWidth];
    clear(x);
    contract<Mac, true>(x, a + at, kTile, rows.data + k * rows.stride, rows.stride, words, lines);
    take(x, static_cast<int>(k), at);
  };
  int64_t left = for_each_micro<kVecs_, kSums>(
      begin, end, [&]<int kRows>(int64_t k) { product.template operator()<kRows, kVecs_>(k, lane); });
  for (; left < end; left += 2) {
    for (int at = lane; at < lane + kVecs_ * kLanes; at += kLanes) {
      if (left + 1 < end) {
        product.template operator()<2, 1>(left, at);
      } else {
        product.template operator()<1, 1>(left, at);
      }
    }
  }
}

template <class Mac, int kSums, class Take, class Done>
void for_each_product(const float* a, int64_t words, const Words& rows, const Part& part, Later& later,
                      const Take& take, const Done& done) {
  for (int v = part.v_begin; v < part.v_end; v += kMicroVecs) {
    const int lane = v * kLanes, begin = part.begin, end = part.end;
    constexpr bool kWide = kMicroVecs == 4;
    switch (part.v_end - v < kMicroVecs ? part.v_end - v : kMicroVecs) {
      case 1: products_of_vecs<Mac, kSums, 1>(a, words, rows, begin, end, lane, later, take); break;
      case 2: products_of_vecs<Mac, kSums, 2>(a, words, rows, begin, end, lane, later, take); break;
      case 3: products_of_vecs<Mac, kSums, kWide ? 3 : 1>(a, words, rows, begin, end, lane, later, take); break;
      default: products_of_vecs<Mac, kSums, kWide ? 4 : 1>(a, words, rows, begin, end, lane, later, take); break;
    }
  }
  done(part.v_begin, part.v_end);
}
#endif

// Calls done(v_begin, v_end) as for_each_product does, where its products have been taken by other ways.
template <class Done>
void for_each_done(const Part& part, const Done& done) {
#ifdef POLYHEAD_HAS_TMM
  for (int v = part.v_begin; v < part.v_end; v += kPartVecs) done(v, v + kPartVecs);
#else
  done(part.v_begin, part.v_end);
#endif
}

template <int kVecs_, class Take>
inline void rows_of_vecs(const float* tile, int begin, int end, int lane, const Take& take) {
  for_all_micro<kVecs_, kMicroRows * kVecs_>(begin, end, [&]<int kRows>(int64_t key) {
    F x[kRows][kVecs_];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs_; ++v) x[r][v] = load(tile + (key + r) * kTile + lane + v * kLanes);
    }
    take(x, static_cast<int>(key), lane);
  });
}

// Calls take(x, key, lane) with kMicroRows rows of a tile [key][query], or the last two or one, of kMicroVecs vectors or of
// one.
template <class Take>
void for_each_row_group(const float* tile, const Part& part, const Take& take) {
  int v = part.v_begin;
  for (; v + kMicroVecs <= part.v_end; v += kMicroVecs) {
    rows_of_vecs<kMicroVecs>(tile, part.begin, part.end, v * kLanes, take);
  }
  for (; v < part.v_end; ++v) rows_of_vecs<1>(tile, part.begin, part.end, v * kLanes, take);
}

// Calls work(strip) with pieces of a part, whose scores stay in the nearest cache while a program runs on them. Products in
// registers tmm overlap with what is done to those before: there the part stays whole.
template <class Work>
void for_each_strip(const Part& part, const Work& work) {
  constexpr int kKeys = kTmm ? kBlock : 2 * kStripKeys;
  Part strip = part;
  for (; strip.begin < part.end; strip.begin = strip.end) {
    strip.end = part.end - strip.begin < kKeys ? part.end : strip.begin + kKeys;
    work(strip);
  }
}

// Products as for_each_product has them, after apply(s, key, lane) -> the program's scores, -inf where hidden, then
// take(s, key, lane): strip by strip; then done(v_begin, v_end) as that calls it.
template <class Mac, int kSums, class Apply, class Take, class Done>
__attribute__((noinline)) void score_by_program(const HeadOptions& head, const float* query, int64_t words,
                                                const Words& keys, const BlockView& view, const Part& part,
                                                Later& later, const Apply& apply, const Take& take, const Done& done) {
  const Options::Memory& options = head.view_memory->options;
  float* const scores = program_memory(options).scores;
  const bool some_hidden = head.score.hides_from_program(view);
  head.score.prepare_program(view, options, part.begin, part.end);
  for_each_strip(part, [&](const Part& strip) {
    for_each_product<Mac, kSums>(
        query, words, keys, strip, later,
        [&]<int kRows, int kVecs_>(F(&s)[kRows][kVecs_], int key, int lane, const auto&...) {
          apply(s, key, lane);
          for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < kVecs_; ++v) store(scores + (key + r) * kTile + lane + v * kLanes, s[r][v]);
          }
        },
        [](int, int) {});
    head.score.run_program(view, options, strip.begin, strip.end);
    for_each_row_group(program_memory(options).results, strip,
                       [&]<int kRows, int kVecs_>(F(&s)[kRows][kVecs_], int key, int lane) {
                         for (int r = 0; some_hidden && r < kRows; ++r) {
                           for (int v = 0; v < kVecs_; ++v) {
                             const M seen = head.score.seen_by_program(view, key + r, lane + v * kLanes);
                             s[r][v] = select(seen, s[r][v], broadcast(-kInfinity));
                           }
                         }
                         take(s, key, lane);
                       });
  });
  for_each_done(part, done);
}

// Of a row with l = 0: whether options leave it a key, so that all it sees has score -inf: exp(-inf + inf), NaN.
inline bool sees_only_minus_infinity(const HeadOptions& head, const QueryTile& tile, int query) {
  const KeyRange range{tile.ranges.begin[query], tile.ranges.end[query]};
  return head.score.leaves_a_key(head.problem.band, range, tile.first_query + query);
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
