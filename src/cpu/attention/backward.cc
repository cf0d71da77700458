// Backward of FlashAttention-2 (algorithm 2 of arXiv:2307.08691) for one instruction set, queries along the lanes.
//   P^T = exp(K Q^T - L)   dP^T = V dO^T   dS^T = P^T (dP^T - delta)           a tile of queries, a block of keys
//   dV += P^T dO   dK += dS^T Q                                                sums over the queries, in memory
//   dQ^T += dS^T K                                                             sums over the keys of a chunk
// Nothing is transposed but Q, dO and the results: P^T and dS^T are read as rows of keys for dK and dV, and as columns of
// queries for dQ.
#include "cpu/attention/backward_tile.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// The products took NaN and inf of Q, dO and K as 0; here these reach the pairs that see them, and no others.
template <class Mac>
void add_not_finite(const Head& head, Tile& tile, const KeyBlock& block, const TileView& t, bool finite_keys) {
  const Problem& problem = head.problem;
  const int64_t sums_key = block.first - head.task.first_key;
  const auto add_rows = [&](float* sums, const Rows& x, const float* weights, int64_t dim) {
    for (int q = 0; q < tile.num_queries && sums != nullptr; ++q) {
      for (int64_t d = 0; d < dim; ++d) {
        const float number = number_at(x, tile.first_query + q, d);
        if (is_finite(number)) continue;
        for (int k = t.begin; k < t.end && k < block.num_keys; ++k) {
          if (head.score.hidden(t.view, k, q)) continue;
          sums[(sums_key + k) * whole_vectors(dim) + d] += element(weights, Mac::kElements, k, q) * number;
        }
      }
    }
  };
  if (!tile.finite) {
    add_rows(head.task.key_sums, head.query, tile.ds_rows, problem.head_dim);
    add_rows(head.task.value_sums, head.grad_out, tile.p_rows, problem.head_dim_v);
  }
  if (finite_keys || !head.wants_queries) return;
  for (int k = t.begin; k < t.end && k < block.num_keys; ++k) {
    for (int64_t d = 0; d < problem.head_dim; ++d) {
      const float number = number_at(head.key, block.first + k, d);
      if (is_finite(number)) continue;
      for (int q = 0; q < tile.num_queries; ++q) {
        if (!head.score.hidden(t.view, k, q)) {
          tile.chunk[d * kTile + q] += element(tile.ds_rows, Mac::kElements, k, q) * number;
        }
      }
    }
  }
}

Rows grad_bias_rows(const Head& head) {
  const Broadcast& to = head.gradients.grad_bias;
  const Operand rows{const_cast<void*>(to.data), to.dtype, to.stride_b, to.stride_q, to.stride_h, to.stride_k};
  return rows_of(rows, head.b, head.h, 0);
}

// Element of the bias's gradient of a tile's first query and a key.
int64_t bias_at(const Head& head, const Tile& tile, int64_t key) {
  const Broadcast& to = head.gradients.grad_bias;
  return head.b * to.stride_b + head.h * to.stride_h + tile.first_query * to.stride_q + key * to.stride_k;
}

// Where a task begins the bias's gradient: 0 of the keys up to `end` that nothing has been written of.
void clear_bias_before(const Head& head, Tile& tile, int64_t end) {
  if (!head.task.begins_bias) return;
  const Broadcast& to = head.gradients.grad_bias;
  for (int q = 0; q < tile.num_queries; ++q) {
    int64_t at = bias_at(head, tile, tile.bias_end) + q * to.stride_q;
    for (int64_t key = tile.bias_end; key < end; key += kLanes, at += kLanes * to.stride_k) {
      const int n = end - key < kLanes ? static_cast<int>(end - key) : kLanes;
      store_elements(const_cast<void*>(to.data), to.dtype, at, to.stride_k, broadcast(0.0f), n);
    }
  }
  tile.bias_end = end;
}

void add_bias(const Head& head, Tile& tile, const KeyBlock& block, const TileView& t) {
  const int end = t.end < block.num_keys ? t.end : block.num_keys;
  clear_bias_before(head, tile, block.first + t.begin);
  store_score_gradients(head.gradients.grad_bias, bias_at(head, tile, block.first + t.begin),
                        head.bias_terms + t.begin * kTile, tile.num_queries, end - t.begin, !head.task.begins_bias);
  tile.bias_end = block.first + end;
}

void clear_if_fresh(const Head& head, Tile& tile) {
  if (tile.fresh) __builtin_memset(tile.chunk, 0, static_cast<size_t>(head.problem.head_dim * kTile) * sizeof(float));
}

// Where a tile and block's share of dQ goes. If it is one product of all queries, a chunk's first begins its sums (those of
// vectors without a query stay what lies there), and its last adds them to those of the chunks before: `last`, if nothing
// follows.
ChunkSums query_sums(const Head& head, Tile& tile, bool all, bool last) {
  ChunkSums sums{tile.chunk};
  if (!head.wants_queries) return sums;
  if (all) {
    sums.fresh = tile.fresh;
    tile.added = !kTmm && last && tile.started && tile.partial == nullptr;
    if (tile.added) sums.whole = tile.grad_query;
  } else {
    clear_if_fresh(head, tile);
  }
  tile.fresh = false;
  return sums;
}

// P and dS of one tile and block, which may be the last of its chunk, and its share of dQ and of the bias's gradient.
template <class Mac>
void backward_tile(Head& head, Tile& tile, const KeyBlock& block, const Words& key_words, bool finite_keys, bool last) {
  for (int g = 0; g < kGroups; ++g) tile.begin[g] = tile.end[g] = 0;
  // Of a pair, or a register, or where all queries are summed, an absent query must give 0.
  const int together = head.task.captures.sums != nullptr ? kTile : kTmm ? kPartLanes : Mac::kElements;
  const TileView t = view_present(head, tile, block, together);
  if (t.begin >= t.end) return;
  if constexpr (Mac::kElements == 1) head.p = tile.p_rows;
  const ChunkSums sums = query_sums(head, tile, t.all, last && tile.finite && finite_keys);
  if (head.bias_terms != nullptr && !t.all) __builtin_memset(head.bias_terms, 0, kTileFloats * sizeof(float));
  for_each_part(t, [&](const Part& part, const BlockView& view) {
    weigh_part<Mac>(head, tile, block, view, part);
    differentiate_scores<Mac>(
        head, tile, block, view, part, head.wants_scores, head.task.captures,
        [&]<int kRows>(F(&p)[kRows], F(&ds)[kRows], int key, int at) {
          store_words<Mac>(head, tile, view, p, ds, key, at);
        },
        [&](int v_begin, int v_end) {
          if (!head.wants_queries) return;
          accumulate<Mac, kMostSums>(*head.later, sums, Mac::kElements == 1 ? tile.ds_rows : head.ds_keys, key_words,
                                     part.begin / Mac::kElements, words_of(part.end, Mac::kElements),
                                     head.problem.head_dim, v_begin, v_end);
        });
    note_groups<Mac>(tile, part);
  });
  if (!tile.finite || !finite_keys) {
    head.later->finish();
    add_not_finite<Mac>(head, tile, block, t, finite_keys);
  }
  if (head.bias_terms != nullptr) add_bias(head, tile, block, t);
}

// While a tile and block are computed: the bias's gradient, and what is added to the scores of the next tile, of those that
// see the keys.
void look_ahead(const Head& head, const Tile& tile, const KeyBlock& block, const Tile& next, int64_t first) {
  if (head.bias_terms != nullptr && sees(tile, block.first, block.first + block.num_keys)) {
    head.scratch->ahead.add(grad_bias_rows(head).from(0, block.first), tile.first_query, tile.num_queries,
                            block.num_keys);
  }
  const int64_t end = first + kBlock, len = head.sequence.len_k;
  const KeyRange keys{first, end < len ? end : len};
  if (sees(next, keys.begin, keys.end)) head.score.options.add_ahead(head.scratch->ahead, next.queries(), keys);
}

template <class Mac>
void backward_block(Head& head, int num_tiles, int64_t first, int64_t next, bool last) {
  const Problem& problem = head.problem;
  const KeyBlock block = load_keys<Mac>(head, first);
  const int64_t padded = whole(end_of_parts(block.num_keys), Mac::kElements);
  const bool finite_keys = !head.may_hide || all_finite(head.key, first, block.num_keys, problem.head_dim);
#ifdef POLYHEAD_HAS_TMM
  const Words key_words =
      values_as_words<Mac>(head.key_words, head.key, first, block.num_keys, padded, problem.head_dim, !finite_keys);
#else
  Words key_words = block.key;
  if (head.wants_queries && (Mac::kElements == 2 || !finite_keys)) {
    key_words = {head.key_words, kPanel, kBlock * kPanel};
    copy_panels<Mac>(head.key_words, kBlock * kPanel, kPanel, head.key, first, block.num_keys, padded, problem.head_dim,
                     !finite_keys);
  }
#endif
  const int64_t next_keys = head.sequence.len_k - next;
  prefetch_rows(head.key, next, next_keys < kBlock ? next_keys : kBlock, problem.head_dim);
  prefetch_rows(head.value, next, next_keys < kBlock ? next_keys : kBlock, problem.head_dim_v);
  QueryTerms keys[kMaxTiles], values[kMaxTiles];
  for (int t = 0; t < num_tiles; ++t) {
    Tile& tile = head.scratch->tile[t];
    const bool more = t + 1 < num_tiles;
    look_ahead(head, tile, block, head.scratch->tile[more ? t + 1 : 0], more ? first : next);
    backward_tile<Mac>(head, tile, block, key_words, finite_keys, last);
    keys[t] = {tile.ds_rows, tile.query_rows, kPanelStride, tile.begin, tile.end};
    values[t] = {tile.p_rows, tile.grad_out_rows, kPanelStride, tile.begin, tile.end};
  }
  head.later->finish();
  const int groups = (block.num_keys + kGroup - 1) / kGroup;
  const int64_t sums_key = first - head.task.first_key;
  if (head.task.value_sums != nullptr) {
    const int64_t columns = whole_vectors(problem.head_dim_v);
    add_keys<Mac>(*head.later, head.task.value_sums + sums_key * columns, columns, values, num_tiles, groups * kGroup);
  }
  if (head.task.key_sums != nullptr) {
    const int64_t columns = whole_vectors(problem.head_dim);
    add_keys<Mac>(*head.later, head.task.key_sums + sums_key * columns, columns, keys, num_tiles, groups * kGroup);
  }
}

// x * factor, where 0 stays +0 whatever the sign.
inline F scaled(F x, float factor) { return fma(x, broadcast(factor), broadcast(0.0f)); }

// dQ of a tile from dQ^T [D][kTile]; null: 0.
void store_queries(const BackwardProblem& problem, const BackwardTask& task, const QueryTile& tile,
                   const float* grad_query) {
  const Operand& to = problem.grad_query;
  const int64_t dim = problem.forward.head_dim;
  const int64_t first =
      task.b * to.stride_b + task.h * to.stride_h + (task.sequence.first_q + tile.first_query) * to.stride_s;
  for (int q = 0; q < tile.num_queries; q += kLanes) {
    int64_t d = 0;
    const auto column = [&](int i) { return scaled(load(grad_query + (d + i) * kTile + q), problem.forward.scale); };
#ifdef POLYHEAD_HAS_BF16_DOT
    const bool pairs = to.dtype == DType::kBFloat16 && to.stride_d == 1 && !problem.accumulate && grad_query != nullptr;
    for (; pairs && d + kTurnedColumns <= dim; d += kTurnedColumns) {
      turn_pairs(static_cast<uint16_t*>(to.data) + first + q * to.stride_s + d, to.stride_s, tile.num_queries - q,
                 column);
    }
#endif
    for (; d < dim; d += kLanes) {
      const int n = dim - d < kLanes ? static_cast<int>(dim - d) : kLanes;
      F block[kLanes];
      for (int i = 0; i < kLanes; ++i) block[i] = i < n && grad_query != nullptr ? column(i) : broadcast(0.0f);
      transpose(block);
      for (int r = 0; r < kLanes && q + r < tile.num_queries; ++r) {
        store_sum(to.data, to.dtype, first + (q + r) * to.stride_s + d * to.stride_d, to.stride_d, block[r], n,
                  problem.accumulate);
      }
    }
  }
}

void add_floats(float* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(to + i) + load(from + i));
}

int64_t end_of_queries(const BackwardTask& task) {
  return task.end_query < task.sequence.len_q ? task.end_query : task.sequence.len_q;
}

int64_t end_of_keys(const BackwardTask& task) {
  return task.end_key < task.sequence.len_k ? task.end_key : task.sequence.len_k;
}

// While the last block of a group of tiles is computed: their dQ and the next group's rows; or dK and dV of what ends with
// it, and the first rows of the next head.
void look_ahead(const Head& head, int64_t group_queries) {
  const BackwardProblem& gradients = head.gradients;
  const Problem& problem = gradients.forward;
  const BackwardTask& task = head.task;
  RowsAhead& ahead = head.scratch->ahead;
  const Tile& first = head.scratch->tile[0];
  const int64_t dim = problem.head_dim, dim_v = problem.head_dim_v, queries = end_of_queries(task);
  const int64_t next = first.first_query + group_queries, left = queries - next;
  if (head.wants_queries && task.partial == nullptr) {
    ahead.add(rows_of(gradients.grad_query, task.b, task.h, task.sequence.first_q), first.first_query,
              left > 0 ? group_queries : queries - first.first_query, dim);
  }
  if (left <= 0 && (task.h + 1) % problem.group == 0) {
    const int64_t keys = end_of_keys(task) - task.first_key;
    const auto add_gradient = [&](const Operand& x, const float* sums, int64_t columns) {
      if (sums == nullptr) return;
      ahead.add(rows_of(x, task.b, task.kv_head, task.sequence.first_k), task.first_key, keys, columns);
    };
    add_gradient(gradients.grad_key, task.key_sums, dim);
    add_gradient(gradients.grad_value, task.value_sums, dim_v);
  }
  const auto add_queries = [&](int64_t b, int64_t h, int64_t row, int64_t rows) {
    const int64_t n = rows < group_queries ? rows : group_queries;
    ahead.add(rows_of(problem.query, b, h, row), 0, n, dim);
    ahead.add(rows_of(gradients.grad_out, b, h, row), 0, n, dim_v);
    ahead.add(rows_of(problem.out, b, h, row), 0, n, dim_v);
  };
  if (left > 0) return add_queries(task.b, task.h, task.sequence.first_q + next, left);
  if (task.next.num_queries == 0) return;
  add_queries(task.next.b, task.next.h, task.next.first_row(), task.next.num_queries);
  add_keys_ahead(ahead, problem, task.next);
}

template <class Mac>
void backward_chunk(Head& head, int num_tiles, int64_t begin, int64_t end, int64_t last) {
  Tile* tiles = head.scratch->tile;
  const int64_t floats = head.problem.head_dim * kTile;
  for (int t = 0; t < num_tiles; ++t) {
    tiles[t].fresh = true;
    tiles[t].added = false;
  }
  int64_t first = next_block(head, tiles, num_tiles, begin / kBlock * kBlock, end);
  while (first < end) {
    const int64_t next = next_block(head, tiles, num_tiles, first + kBlock, end);
    if (next >= last) look_ahead(head, int64_t{head.tiles_at_once} * kTile);
    backward_block<Mac>(head, num_tiles, first, next, next >= end);
    first = next;
  }
  if (!head.wants_queries) return;
  for (int t = 0; t < num_tiles; ++t) {
    Tile& tile = tiles[t];
    if (!sees(tile, begin, end) || tile.added) continue;
    clear_if_fresh(head, tile);
    if (tile.partial != nullptr) {
      if (tile.partial != tile.chunk)
        __builtin_memcpy(tile.partial, tile.chunk, static_cast<size_t>(floats) * sizeof(float));
      continue;
    }
    if (tile.started) {
      add_floats(tile.grad_query, tile.chunk, floats);
    } else {
      float* chunk = tile.chunk;
      tile.chunk = tile.grad_query;
      tile.grad_query = chunk;
      tile.started = true;
    }
  }
}

template <class Mac>
void backward_tiles(Head& head, int num_tiles) {
  const BackwardTask& task = head.task;
  Tile* tiles = head.scratch->tile;
  const int64_t end = end_of_keys(task);
  bool any = false;
  int64_t last = 0;  // key that some tile sees
  for (int t = 0; t < num_tiles; ++t) {
    any = any || sees(tiles[t], task.first_key, end);
    if (tiles[t].ranges.last() > last) last = tiles[t].ranges.last();
  }
  if (end < last) last = end;
  head.scratch->ahead.clear();
  for (int t = 0; t < num_tiles && any; ++t) {
    load_tile<Mac>(head, tiles[t], tiles[t].p_rows);
    load_rows<Mac>(head, tiles[t]);
  }
  for (int64_t chunk = task.first_key; chunk < end && any; chunk += task.chunk_keys) {
    backward_chunk<Mac>(head, num_tiles, chunk, end - chunk < task.chunk_keys ? end : chunk + task.chunk_keys, last);
  }
  for (int t = 0; t < num_tiles; ++t) clear_bias_before(head, tiles[t], end);
  if (!head.wants_queries || task.partial != nullptr) return;
  for (int t = 0; t < num_tiles; ++t) {
    store_queries(head.gradients, task, tiles[t], tiles[t].started ? tiles[t].grad_query : nullptr);
  }
}

int64_t panel_floats(int64_t columns, int64_t panel, int64_t rows) {
  return (columns + panel - 1) / panel * panel * rows;
}

// In floats, what a head needs and what each tile needs.
int64_t head_floats(int64_t dim, int64_t dim_v, bool additive, bool softcap) {
  return kBlock * (dim + dim_v) + panel_floats(dim, kPanel, kBlock) + kTileFloats * (additive ? 3 : 2) +
         Options::memory_floats({additive, softcap, true});
}
int64_t tile_floats(int64_t dim, int64_t dim_v) {
  return kTile * (3 * dim + dim_v) + panel_floats(dim, kKeyColumns, kTile) + panel_floats(dim_v, kKeyColumns, kTile) +
         2 * kTileFloats;
}

constexpr int64_t kScratchFloats = (sizeof(BackwardMemory) + 63) / 64 * 16;

template <class Mac>
void backward_task(const BackwardProblem& gradients, const BackwardTask& task, int tiles, float* memory) {
  const Problem& problem = gradients.forward;
  const int64_t dim = whole(problem.head_dim, kDimStep), dim_v = whole(problem.head_dim_v, kDimStep);
  BackwardMemory* scratch = reinterpret_cast<BackwardMemory*>(memory);
  memory += kScratchFloats;
  Head head{
      gradient_head(gradients, task.sequence, task.b, task.h, &scratch->view),
      task,
      scratch,
      nullptr,
      nullptr,
      nullptr,
      false,
      gradients.grad_query.data != nullptr,
      gradients.grad_query.data != nullptr || task.key_sums != nullptr || task.bias || task.captures.sums != nullptr,
      tiles};
  head.may_hide = head.score.options.may_hide() || !is_open(problem.band);
  Later later;
  head.later = &later;
  later.ahead = &scratch->ahead;
  scratch->ahead.share_out(1, 2 * kUnitsOfLine);  // what a group of tiles needs, within its last block
  head.key_copy = take(memory, kBlock * dim);
  head.value_copy = take(memory, kBlock * dim_v);
  head.key_words = take(memory, panel_floats(dim, kPanel, kBlock));
  head.p = take(memory, kTileFloats);
  head.ds_keys = take(memory, kTileFloats);
  head.score.options.take_memory(scratch->view.options, memory, true);
  head.bias_terms = task.bias ? take(memory, kTileFloats) : nullptr;
  for (int t = 0; t < tiles; ++t) {
    Tile& tile = scratch->tile[t];
    tile.p_rows = take(memory, kTileFloats);
    tile.ds_rows = take(memory, kTileFloats);
    tile.query = take(memory, dim * kTile);
    tile.grad_out = take(memory, dim_v * kTile);
    tile.grad_query = take(memory, dim * kTile);
    tile.chunk = take(memory, dim * kTile);
    tile.query_rows = take(memory, panel_floats(dim, kKeyColumns, kTile));
    tile.grad_out_rows = take(memory, panel_floats(dim_v, kKeyColumns, kTile));
  }
  const int64_t queries = end_of_queries(task);
  for (int64_t first = task.first_query; first < queries; first += int64_t{tiles} * kTile) {
    int num_tiles = 0;
    for (int64_t q = first; q < queries && num_tiles < tiles; q += kTile, ++num_tiles) {
      Tile& tile = scratch->tile[num_tiles];
      tile.first_query = q;
      tile.num_queries = queries - q < kTile ? static_cast<int>(queries - q) : kTile;
      tile.ranges = tile_ranges(problem.band, task.sequence, q, tile.num_queries);
      tile.started = false;
      tile.bias_end = task.first_key;
      tile.partial =
          task.partial == nullptr ? nullptr : task.partial + (q - task.first_query) / kTile * problem.head_dim * kTile;
      if (tile.partial != nullptr && dim == problem.head_dim) tile.chunk = tile.partial;
    }
    backward_tiles<Mac>(head, num_tiles);
  }
}

// Rows [first_key, end_key) of dK or dV.
void store_keys(const BackwardProblem& problem, const BackwardTask& task, const Operand& to, const float* sums,
                int64_t dim, float factor) {
  const int64_t end = end_of_keys(task);
  for (int64_t k = task.first_key; k < end; ++k, sums += whole_vectors(dim)) {
    const int64_t row = task.b * to.stride_b + task.kv_head * to.stride_h + (task.sequence.first_k + k) * to.stride_s;
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int n = dim - d < kLanes ? static_cast<int>(dim - d) : kLanes;
      store_sum(to.data, to.dtype, row + d * to.stride_d, to.stride_d, scaled(load(sums + d), factor), n,
                problem.accumulate);
    }
  }
}

}  // namespace

size_t backward_scratch_bytes(int64_t head_dim, int64_t head_dim_v, int tiles, bool additive, bool softcap) {
  const int64_t dim = whole(head_dim, kDimStep), dim_v = whole(head_dim_v, kDimStep);
  const int64_t floats = kScratchFloats + head_floats(dim, dim_v, additive, softcap) + tiles * tile_floats(dim, dim_v);
  return static_cast<size_t>((floats + 15) / 16 * 16) * sizeof(float);
}

size_t backward_sum_floats(int64_t num_keys, int64_t dim) {
  return static_cast<size_t>(whole(num_keys, kGroup) * whole_vectors(dim));
}

void backward_head(const BackwardProblem& problem, const BackwardTask& task, int tiles, void* scratch) {
  with_words(in_bf16_pairs(problem),
             [&]<class Mac>() { backward_task<Mac>(problem, task, tiles, static_cast<float*>(scratch)); });
}

void backward_keys(const BackwardProblem& problem, const BackwardTask& task) {
  const Problem& p = problem.forward;
  if (task.key_sums != nullptr) store_keys(problem, task, problem.grad_key, task.key_sums, p.head_dim, p.scale);
  if (task.value_sums != nullptr) {
    store_keys(problem, task, problem.grad_value, task.value_sums, p.head_dim_v, p.dropout.scale);
  }
}

void backward_queries(const BackwardProblem& problem, const BackwardTask& task, int64_t first_query, float* sum,
                      const float* partial, ptrdiff_t partial_stride) {
  const Sequence& s = task.sequence;
  const int64_t floats = problem.forward.head_dim * kTile;
  QueryTile tile;
  tile.first_query = first_query;
  tile.num_queries = s.len_q - first_query < kTile ? static_cast<int>(s.len_q - first_query) : kTile;
  tile.ranges = tile_ranges(problem.forward.band, s, first_query, tile.num_queries);
  const int64_t last = end_of_keys(task);
  for (int64_t first = task.first_key; first < last; first += task.chunk_keys, partial += partial_stride) {
    if (!sees(tile, first, last - first < task.chunk_keys ? last : first + task.chunk_keys)) continue;
    if (first > 0 && sees(tile, 0, first)) {
      add_floats(sum, partial, floats);
    } else {
      __builtin_memcpy(sum, partial, static_cast<size_t>(floats) * sizeof(float));
    }
  }
  if (task.end_key >= s.len_k) store_queries(problem, task, tile, sees(tile, 0, s.len_k) ? sum : nullptr);
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
