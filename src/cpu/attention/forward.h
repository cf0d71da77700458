// FlashAttention-2 forward (algorithm 1 of arXiv:2307.08691) for one instruction set, queries along the lanes.
#pragma once

#include "cpu/attention/key_block.h"
#include "cpu/attention/probabilities.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Half of the pair in which number `key` of P^T lies.
inline float half_at(const float* p, int key, int lane) {
  uint32_t word;
  __builtin_memcpy(&word, p + key / 2 * kTile + lane, sizeof word);
  word = key % 2 == 0 ? word << 16 : word & 0xffff0000u;
  float p_k;
  __builtin_memcpy(&p_k, &word, sizeof p_k);
  return p_k;
}

template <class Mac>
float probability_at(const float* p, int key, int lane) {
  if constexpr (Mac::kElements == 1) return p[key * kTile + lane];
#ifdef POLYHEAD_HAS_TMM
  if constexpr (Mac::kPlanes > 1) {
    const float low = half_at(p + 2 * kWeightsPlane, key, lane), middle = half_at(p + kWeightsPlane, key, lane);
    return half_at(p, key, lane) + (middle + low);
  }
#endif
  return half_at(p, key, lane);
}

// In the careful pass V's NaN and inf were taken as 0; here those of keys [begin, end) reach the queries that see them, and no
// others.
template <class Mac>
void add_not_finite(const Head& head, Tile& tile, const KeyBlock& block, const TileView& t, int begin, int end) {
  alignas(64) float row[kLanes];
  for (int k = begin; k < end && k < block.num_keys; ++k) {
    const Rows value = head.value.in_place(block.first + k, 1);
    for (int64_t d = 0; d < head.problem.head_dim_v; ++d) {
      store(row, load_columns(value, 0, d, 1));
      if (row[0] - row[0] == 0.0f) continue;
      for (int q = 0; q < tile.num_queries; ++q) {
        if (head.score.hidden(t.view, k, q)) continue;
        tile.state.out[d * kTile + q] += probability_at<Mac>(head.scratch->p, k, q) * row[0];
      }
    }
  }
}

void clear_if_fresh(const Head& head, Tile& tile) {
  if (!tile.fresh) return;
  __builtin_memset(tile.state.out, 0, static_cast<size_t>(head.problem.head_dim_v) * kTile * sizeof(float));
  tile.fresh = false;
}

// Products with V of keys that came before, and O in memory.
template <class Mac>
void finish_products(const Head& head) {
  head.later->finish();
#ifdef POLYHEAD_HAS_TMM
  if constexpr (Mac::kPlanes == 1) {
    if (head.held == nullptr) return;
    const SubnormalsAsZero as_registers_do;
    head.held->finish();
  }
#endif
}

#ifdef POLYHEAD_HAS_TMM
// O that is held stands under a maximum that later keys of a block may raise: unit by unit.
template <class Mac>
void attend_carefully(const Head& head, Tile& tile, const KeyBlock& block, const TileView& t) {
  for_each_part(t, [&](Part part, const BlockView& view) {
    for (const int end = part.end; part.begin < end; part.begin = part.end) {
      part.end = part.begin + kUnitKeys;
      score_keys<Mac, Mac>(head, tile, block, view, part, true);
      finish_products<Mac>(head);
      add_not_finite<Mac>(head, tile, block, t, part.begin, part.end);
    }
  });
}
#endif

template <class Mac>
void attend_block(const Head& head, Tile& tile, const KeyBlock& block) {
  const TileView t = view_block(head, tile, block.first, block.num_keys);
  if (t.begin >= t.end) return;
  if (!t.all || head.score.hides(t.view)) tile.some_hidden = true;
  if (!t.all || head.careful) clear_if_fresh(head, tile);  // else O^T begins with the block's one product
#ifdef POLYHEAD_HAS_TMM
  if constexpr (Mac::kPlanes == 1) {
    if (head.held != nullptr && head.careful) return attend_carefully<Mac>(head, tile, block, t);
  }
#endif
  for_each_part(
      t, [&](const Part& part, const BlockView& view) { score_keys<Mac, Mac>(head, tile, block, view, part, true); });
  tile.fresh = false;
  if (!head.careful) return;
  finish_products<Mac>(head);
  add_not_finite<Mac>(head, tile, block, t, t.begin, t.end);
}

// How a tile's rows end: what O is divided by, and L.
struct RowEnds {
  alignas(64) float divisor[kTile];
  alignas(64) float reciprocal[kTile];
  alignas(64) float logsumexp[kTile];
  uint64_t hidden;  // a bit for each query
};

void end_rows(RowEnds& ends, const Head& head, const Tile& tile) {
  ends.hidden = 0;
  if (!head.problem.softmax) {
    for (int q = 0; q < kTile; ++q) ends.divisor[q] = ends.reciprocal[q] = 1;
    return;
  }
  uint64_t without_sum = 0;
  for (int q = 0; q < kTile; q += kLanes) {
    const F l = load(tile.state.l + q), m = load(tile.state.m + q);
    const M none = equal(l, broadcast(0.0f));
    without_sum |= uint64_t{bits(none)} << q;
    const F sum = load((head.rounded_p ? tile.state.l_rounded : tile.state.l) + q);
    const F divisor = select(none, broadcast(1.0f), sum);
    store(ends.divisor + q, divisor);
    store(ends.reciprocal + q, broadcast(1.0f) / divisor);
    const F scale = broadcast(head.score.to_natural);
    store(ends.logsumexp + q, select(none, broadcast(-kInfinity), fma(m, scale, log(l))));
  }
  for (; without_sum != 0; without_sum &= without_sum - 1) {
    const int q = __builtin_ctzll(without_sum);
    if (q >= tile.num_queries) break;
    if (sees_only_minus_infinity(head, tile, q)) {
      ends.divisor[q] = ends.reciprocal[q] = ends.logsumexp[q] = __builtin_nanf("");
    } else {
      ends.hidden |= uint64_t{1} << q;
    }
  }
}

bool finite_output(const Tile& tile, int64_t dim) {
  for (int q = 0; q < tile.num_queries; q += kLanes) {
    F sum = broadcast(0.0f);  // NaN as soon as one term is NaN or inf
    for (int64_t d = 0; d < dim; ++d) sum = fma(load(tile.state.out + d * kTile + q), broadcast(0.0f), sum);
    const int rows = tile.num_queries - q < kLanes ? tile.num_queries - q : kLanes;
    if ((~bits(equal(sum, broadcast(0.0f))) & ((1u << rows) - 1)) != 0) return false;
  }
  return true;
}

// Rows [q, q + kLanes) and columns from d on of a tile's output, transposed back and written. Returned: how many columns.
int store_output(const Problem& problem, int64_t at, const Tile& tile, const RowEnds& ends, int q, int64_t d) {
  const Operand& out = problem.out;
  const int64_t dim = problem.head_dim_v;
  const F divisor = load(ends.divisor + q), reciprocal = load(ends.reciprocal + q);
  const F scale = broadcast(problem.dropout.scale);
  // + 0: where O is 0, the signs of hidden values, times 0, would decide between 0 and -0.
  const float* const sums = tile.state.out + q;
  const auto row = [=](int64_t d_i) __attribute__((always_inline)) {
    return divide(load(sums + d_i * kTile), divisor, reciprocal) * scale + broadcast(0.0f);
  };
  const int rows = tile.num_queries - q < kLanes ? tile.num_queries - q : kLanes;
  const int n = dim - d < kLanes ? static_cast<int>(dim - d) : kLanes;
  F block[kLanes];
  if (n == kLanes && out.dtype == DType::kFloat32 && out.stride_d == 1 && ends.hidden == 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) block[i] = row(d + i);
    transpose(block);
    float* target = static_cast<float*>(out.data) + at;
#pragma GCC unroll 16
    for (int r = 0; r < kLanes && r < rows; ++r) store(target + r * out.stride_s, block[r]);
    return n;
  }
#ifdef POLYHEAD_HAS_BF16_DOT
  if (dim - d >= kTurnedColumns && out.dtype == DType::kBFloat16 && out.stride_d == 1 && ends.hidden == 0) {
    turn_pairs(
        static_cast<uint16_t*>(out.data) + at, out.stride_s,
        rows, [=](int i) __attribute__((always_inline)) { return row(d + i); });
    return kTurnedColumns;
  }
#endif
  for (int i = 0; i < kLanes; ++i) {
    block[i] = i < n ? row(d + i) : broadcast(0.0f);
  }
  transpose(block);
  for (int r = 0; r < rows; ++r) {
    store_elements(out.data, out.dtype, at + r * out.stride_s, out.stride_d,
                   (ends.hidden >> (q + r) & 1) != 0 ? broadcast(0.0f) : block[r], n);
  }
  return n;
}

// O / l and L, written out. False if something hidden was computed and O holds NaN or inf: hidden values may have leaked.
bool finish_tile(const Head& head, Tile& tile) {
  const Problem& problem = head.problem;
  if ((tile.some_hidden || head.by_planes) && !head.careful && !finite_output(tile, problem.head_dim_v)) return false;
  RowEnds ends;
  end_rows(ends, head, tile);
  const int64_t row0 = head.task.sequence.first_q + tile.first_query;
  const Operand& out = problem.out;
  const int64_t out0 = head.task.b * out.stride_b + head.task.h * out.stride_h + row0 * out.stride_s;
  for (int q = 0; q < tile.num_queries; q += kLanes) {
    for (int64_t d = 0; d < problem.head_dim_v;) {
      d += store_output(problem, out0 + q * out.stride_s + d * out.stride_d, tile, ends, q, d);
    }
  }
  if (problem.logsumexp.data == nullptr) return true;
  for (int q = 0; q < tile.num_queries; ++q) {
    *at(problem.logsumexp, head.task.b, head.task.h, row0 + q) = ends.logsumexp[q];
  }
  return true;
}

// Blocks of keys and values that are copied at a time.
constexpr int blocks_at_once(int64_t head_dim, int64_t head_dim_v, int planes) {
  if (planes > 1 || !held_dims(head_dim, head_dim_v)) return 1;
  return head_dim <= kHeldDims ? kRunBlocks : kRunBlocksInHalves;
}

// Whether nothing changes scores or drops weights: products alone.
bool without_options(const Head& head) { return !head.score.scaled_first && head.problem.dropout.scale == 1.0f; }

#ifdef POLYHEAD_HAS_TMM
// Whether `held` computes O: by what does not differ between the queries of a call, for how sums are cut decides how they are
// rounded. Half of O with options is slower than `later`.
bool holds_out(const Head& head) {
  const Problem& problem = head.problem;
  if (!held_dims(problem.head_dim, problem.head_dim_v) || !problem.softmax || head.score.by_program) return false;
  return problem.head_dim <= kHeldDims || without_options(head);
}
#endif

// Blocks that are computed together: of as many O of some queries stays in registers.
int run_blocks(const Head& head) {
  const bool run = head.held != nullptr && !head.careful && without_options(head);
  return run ? blocks_at_once(head.problem.head_dim, head.problem.head_dim_v, 1) : 1;
}

// Units of the products of tiles and keys, which ask for what comes next.
int64_t units_of(const Head& head, const Tile* tiles, int num_tiles, const KeyRange& of) {
  constexpr int kVecsAtOnce = kTmm ? kPartVecs : kMicroVecs, kRows = kForwardSums / kVecsAtOnce;
  const int64_t dims = head.problem.head_dim + head.problem.head_dim_v;
  const int64_t of_tile = kTmm ? kTile : kVecs / kVecsAtOnce * (dims / kRows);
  int64_t units = 0;
  for (int t = 0; t < num_tiles; ++t) {
    const int64_t first = tiles[t].ranges.first(), last = tiles[t].ranges.last();
    const int64_t seen = (last < of.end ? last : of.end) - (first > of.begin ? first : of.begin);
    if (seen > 0) units += seen * (head.held != nullptr ? whole(tiles[t].num_queries, kHeldLanes) : of_tile);
  }
  return units + 1;
}

// What is added to the scores of the first tile that sees some of the keys, or of all others.
void add_terms_ahead(const Head& head, const Tile* tiles, int num_tiles, const KeyRange& keys, bool of_first) {
  bool is_first = true;
  for (int t = 0; t < num_tiles; ++t) {
    if (!sees(tiles[t], keys.begin, keys.end)) continue;
    if (is_first == of_first) head.score.options.add_ahead(head.scratch->ahead, tiles[t].queries(), keys);
    is_first = false;
  }
}

// Whether keys and values that come next are asked for. Not hundreds that lie 1 KiB or more apart, beside products of which
// half of O is held: one that asks for another page of memory waits for its address, and what follows it waits too.
bool asks_for_keys(const Head& head) {
  const Operand& key = head.problem.key;
  return head.held == nullptr || head.problem.head_dim <= kHeldDims || numbers_bytes(key.dtype, key.stride_s) < 1024;
}

// While some blocks are computed: what is added to the scores of their tiles, in turn, and the next ones' keys, or with the
// last the rows of O and the next task's. Asked for a block before, rows 4 KiB or more apart, which share a few sets of a
// cache, would push each other out.
void look_ahead(const Head& head, const Tile* tiles, int num_tiles, const KeyRange& now, int64_t next, int64_t end) {
  const Problem& problem = head.problem;
  const ForwardTask& task = head.task;
  RowsAhead& ahead = head.scratch->ahead;
  const int64_t most = run_blocks(head) * kBlock;
  add_terms_ahead(head, tiles, num_tiles, now, false);
  if (next < end) {
    const int64_t left = task.sequence.len_k - next, keys = left < most ? left : most;
    if (asks_for_keys(head)) {
      ahead.add(head.key.at(next, keys, head.scratch->key_places), 0, keys, problem.head_dim);
      ahead.add(head.value.at(next, keys, head.scratch->value_places), 0, keys, problem.head_dim_v);
    }
    add_terms_ahead(head, tiles, num_tiles, {next, next + keys}, true);
  } else {
    NextRows then = task.next;
    then.other_keys = then.other_keys && asks_for_keys(head);
    ahead.add(rows_of(problem.out, task.b, task.h, task.sequence.first_q), task.first_query, task.num_queries,
              problem.head_dim_v);
    ahead.add(rows_of(problem.query, then.b, then.h, then.first_row()), 0, then.num_queries, problem.head_dim);
    add_keys_ahead(ahead, problem, then, problem.key.page_table == nullptr ? most : kBlock);
  }
  ahead.share_out(units_of(head, tiles, num_tiles, now));
}

// A tile and blocks that follow each other: by hold_blocks() or one by one, which changes no bit.
template <class Mac>
void attend_blocks(const Head& head, Tile& tile, const KeyBlock* blocks, int num_blocks) {
  for (int b = 0; b < num_blocks; ++b) {
#ifdef POLYHEAD_HAS_TMM
    if constexpr (Mac::kPlanes == 1) {
      int end = b;
      while (num_blocks > 1 && end < num_blocks && sees_all(tile.ranges, blocks[end].first, blocks[end].num_keys))
        ++end;
      if (end > b) {
        const SubnormalsAsZero as_registers_do;
        hold_blocks(head, tile, blocks + b, end - b);
        b = end - 1;
        continue;
      }
    }
#endif
    attend_block<Mac>(head, tile, blocks[b]);
  }
}

template <class Mac>
void attend(Head& head, Tile* tiles, int num_tiles) {
  int64_t begin = head.task.sequence.len_k, end = 0;
  const float sink = sink_of(head.problem, head.h);  // a score that has been seen already, with a value of 0
  const bool none = sink == -kInfinity;
  for (int t = 0; t < num_tiles; ++t) {
    Tile& tile = tiles[t];
    tile.some_hidden = false;
    for (int q = 0; q < kTile; ++q) {
      tile.state.m[q] = tile.state.m_of_out[q] = none ? kNoMaximum : sink;
      tile.state.l[q] = tile.state.l_rounded[q] = none ? 0 : 1;
    }
    tile.fresh = true;
    if (tile.ranges.first() < begin) begin = tile.ranges.first();
    if (tile.ranges.last() > end) end = tile.ranges.last();
  }
  int64_t first = next_block(head, tiles, num_tiles, begin / kBlock * kBlock, end);
  while (first < end) {
    if (head.held != nullptr || head.later->reads(head.value_copy)) finish_products<Mac>(head);
    KeyBlock blocks[kRunBlocks];
    int num_blocks = 0;
    const int64_t begin_of_run = first;
    do {
      blocks[num_blocks] = load_block<Mac>(head, first, num_blocks);
      first = next_block(head, tiles, num_tiles, first + kBlock, end);
      ++num_blocks;
    } while (first < end && num_blocks < run_blocks(head));
    const KeyBlock& last = blocks[num_blocks - 1];
    look_ahead(head, tiles, num_tiles, {begin_of_run, last.first + last.num_keys}, first, end);
    for (int t = 0; t < num_tiles; ++t) attend_blocks<Mac>(head, tiles[t], blocks, num_blocks);
    if (head.held == nullptr) swap(head.value_copy, head.value_copy_before);
  }
  finish_products<Mac>(head);
  head.scratch->ahead.ask_all();
  for (int t = 0; t < num_tiles; ++t) clear_if_fresh(head, tiles[t]);
}

// What copies of so many numbers take: pairs of bfloat16, in planes or not, where there are registers tmm; else floats.
constexpr int64_t floats_of_words(int64_t numbers, int planes) { return kTmm ? numbers / 2 * planes : numbers; }

// V of the blocks; of one block twice, for `later` may read the block before.
constexpr int64_t floats_of_values(int blocks, int64_t dim_v, int planes) {
  return floats_of_words((kTmm && blocks == 1 ? 2 : blocks) * kBlock * dim_v, planes);
}

template <class Mac>
void forward_task(const Problem& problem, const ForwardTask& task, void* memory) {
  const Sequence& s = task.sequence;
  const int64_t kv_head = task.h / problem.group;
  ForwardMemory* scratch = static_cast<ForwardMemory*>(memory);
  scratch->ahead.clear();
  float* floats = reinterpret_cast<float*>(static_cast<char*>(memory) + round_up(sizeof(ForwardMemory)));
  const int64_t dim = whole(problem.head_dim, kDimStep), dim_v = whole(problem.head_dim_v, kDimStep);
  const int blocks = blocks_at_once(problem.head_dim, problem.head_dim_v, Mac::kPlanes);
  float* const values = floats + floats_of_words(blocks * kBlock * dim, Mac::kPlanes);
  Later later;
  later.ahead = &scratch->ahead;
  Head head{{problem, s, task.b, task.h, &scratch->view},
            task,
            key_rows_of(problem.key, task.b, kv_head, s.first_k, s.len_k),
            key_rows_of(problem.value, task.b, kv_head, s.first_k, s.len_k),
            scratch,
            floats,
            values,
            values + (kTmm ? floats_of_words(kBlock * dim_v, Mac::kPlanes) : 0),
            &later,
            nullptr,
            Mac::kRounded,
            Mac::kPlanes > 1,
            false};
  floats = values + floats_of_values(blocks, dim_v, Mac::kPlanes);
  int num_tiles = 0;
  for (int64_t done = 0; done < task.num_queries; done += kTile, ++num_tiles) {
    Tile& tile = scratch->tile[num_tiles];
    tile.first_query = task.first_query + done;
    tile.num_queries = task.num_queries - done < kTile ? static_cast<int>(task.num_queries - done) : kTile;
    tile.query = floats;
    tile.state.out = floats + floats_of_words(dim * kTile, Mac::kPlanes);
    floats = tile.state.out + dim_v * kTile;
    tile.ranges = tile_ranges(problem.band, s, tile.first_query, tile.num_queries);
    const Rows query = rows_of(problem.query, task.b, task.h, s.first_q + tile.first_query);
    prefetch_rows(query, 0, tile.num_queries, problem.head_dim);
    transpose_rows<Mac>(tile.query, query, tile.num_queries, problem.head_dim);
#ifdef POLYHEAD_HAS_TMM
    if constexpr (Mac::kPlanes > 1) {
      tile.wild = wild_lanes(tile.query, tile.num_queries, row_words<Mac>(problem.head_dim));
    }
#endif
  }
  head.score.options.take_memory(scratch->view.options, floats, false);
#ifdef POLYHEAD_HAS_TMM
  HeldOut held(&scratch->ahead, scratch->p, problem.head_dim, head.score.to_log2);
  if (Mac::kPlanes == 1 && holds_out(head)) head.held = &held;
#endif
  attend<Mac>(head, scratch->tile, num_tiles);
  for (int t = 0; t < num_tiles; ++t) {
    Tile& tile = scratch->tile[t];
    if (!finish_tile(head, tile)) {
      head.careful = true;
      attend<Mac>(head, &tile, 1);
      finish_tile(head, tile);
      head.careful = false;
    }
    if (task.attn_weights || task.mean != nullptr || task.columns != nullptr) second_pass<Mac>(head, tile);
  }
}

// Behind ForwardMemory lie, in floats: K and V of some blocks, Q^T and O^T of each tile, then the additive tile.
inline size_t scratch_bytes_of(int64_t head_dim, int64_t head_dim_v, int tiles, bool additive, int planes) {
  const int64_t dim = whole(head_dim, kDimStep), dim_v = whole(head_dim_v, kDimStep);
  const int blocks = blocks_at_once(head_dim, head_dim_v, planes);
  const int64_t floats = floats_of_words(blocks * kBlock * dim, planes) + floats_of_values(blocks, dim_v, planes) +
                         tiles * (floats_of_words(dim * kTile, planes) + dim_v * kTile);
  return round_up(sizeof(ForwardMemory)) + round_up(static_cast<size_t>(floats) * sizeof(float)) +
         static_cast<size_t>(Options::memory_floats({additive, false, false})) * sizeof(float);
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
