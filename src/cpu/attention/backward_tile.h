// Tiles of queries in backward, and the words that their products read.
#pragma once

#include "cpu/attention/gradient.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kGroups = kBlock / kGroup;
constexpr int kPanelStride = kTile * kKeyColumns;

struct Tile : GradientTile {
  float *query_rows, *grad_out_rows;  // words along the queries, in panels of kKeyColumns
  bool finite;                        // Q and dO
  float* p_rows;                      // P^T after dropout, words along the queries: [kBlock][kTile]
  float* ds_rows;
  float *grad_query, *chunk;         // dQ^T [D][kTile]: of all chunks so far, and of the one at hand
  float* partial;                    // where the chunk's share belongs, if not to grad_query
  bool started;                      // grad_query holds a chunk
  bool fresh;                        // chunk holds nothing yet, but what lay there
  bool added;                        // to grad_query, with its last product: what chunk holds
  int64_t bias_end;                  // a task that begins the bias's gradient: its keys before this one are written
  int begin[kGroups], end[kGroups];  // words of queries that see some key of the group
};

struct BackwardMemory {
  Tile tile[kMaxTiles];
  ViewMemory view;
  RowsAhead ahead;
};

struct Head : GradientHead {
  const BackwardTask& task;
  BackwardMemory* scratch;
  float* ds_keys;    // dS^T of the tile at hand, words along the keys
  float* key_words;  // K of the block at hand, words along the keys, in panels of kPanel, if its rows are no such words
  float* bias_terms;  // of the tile at hand, to add to the bias's gradient; null: that is not asked for
  bool may_hide;      // some pair that is computed may be hidden
  bool wants_queries, wants_scores;
  int tiles_at_once;
};

template <class Mac>
void load_rows(const Head& head, Tile& tile) {
  const Problem& problem = head.problem;
  const Rows query = head.query.from(tile.first_query, 0), grad_out = head.grad_out.from(tile.first_query, 0);
  const int n = tile.num_queries;
  const int64_t padded = whole(n, Mac::kElements > kQueryStep ? Mac::kElements : kQueryStep);
  tile.finite =
      !head.may_hide || (all_finite(query, 0, n, problem.head_dim) && all_finite(grad_out, 0, n, problem.head_dim_v));
  const bool clean = !tile.finite;
  if (head.task.key_sums != nullptr) {
    copy_panels<Mac>(tile.query_rows, kPanelStride, kKeyColumns, query, 0, n, padded, problem.head_dim, clean);
  }
  if (head.task.value_sums != nullptr) {
    copy_panels<Mac>(tile.grad_out_rows, kPanelStride, kKeyColumns, grad_out, 0, n, padded, problem.head_dim_v, clean);
  }
}

// P and dS of kRows keys of kLanes queries as the words that the three products read.
template <class Mac, int kRows>
inline void store_words(const Head& head, const Tile& tile, const BlockView& view, F (&p)[kRows], F (&ds)[kRows],
                        int key, int at) {
  const Options::Memory& memory = head.view_memory->options;
  if (head.bias_terms != nullptr) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      store(head.bias_terms + (key + r) * kTile + at,
            head.score.gradient_after<MaskAndBias>(ds[r], view, key + r, at, memory));
    }
  }
  if (head.score.scaled_first) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) ds[r] = head.score.raw_gradient(ds[r], view, key + r, at, memory);
  }
  float *const p_rows = tile.p_rows, *const ds_rows = tile.ds_rows;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const int place = (key + r) * kTile + at;
    if constexpr (Mac::kElements == 1) {
      store(ds_rows + place, ds[r]);
      if (view.kept != nullptr) store(p_rows + place, p[r]);  // else head.p is p_rows
    } else {
      store_bf16(reinterpret_cast<uint16_t*>(p_rows) + place, p[r]);
      store_bf16(reinterpret_cast<uint16_t*>(ds_rows) + place, ds[r]);
    }
  }
#ifdef POLYHEAD_HAS_BF16_DOT
  if constexpr (Mac::kElements == 2) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r += 2) {
      store(head.ds_keys + (key + r) / 2 * kTile + at, pair_bf16(ds[r], r + 1 < kRows ? ds[r + 1] : broadcast(0.0f)));
    }
  }
#endif
}

// Notes which words of queries a part gives to the keys of its groups; rows of these groups that it does not compute
// become 0, and so do queries beside it up to a whole step of sums over queries.
template <class Mac>
void note_groups(Tile& tile, const Part& part) {
  constexpr int kRowWords = kTile / Mac::kElements;
  const int words = (tile.num_queries + Mac::kElements - 1) / Mac::kElements;
  const int end = part.v_end * kLanes / Mac::kElements;
  for (int g = part.begin / kGroup; g * kGroup < part.end; ++g) {
    tile.begin[g] = part.v_begin * kLanes / Mac::kElements;
    tile.end[g] = end < words ? end : words;
  }
  const auto clear_rows = [&](int from, int to) {
    for (int k = from; k < to; ++k) {
      for (int w = 0; w < kRowWords; w += kLanes) {
        store(tile.p_rows + k * kRowWords + w, broadcast(0.0f));
        store(tile.ds_rows + k * kRowWords + w, broadcast(0.0f));
      }
    }
  };
  clear_rows(part.begin / kGroup * kGroup, part.begin);
  clear_rows(part.end, static_cast<int>(whole(part.end, kGroup)));
  const auto clear_queries = [&](int from, int to) {
    for (int k = part.begin; k < part.end && from < to; ++k) {
      const size_t bytes = static_cast<size_t>(to - from) * kWordBytes / Mac::kElements;
      __builtin_memset(tile.p_rows + k * kRowWords + from / Mac::kElements, 0, bytes);
      __builtin_memset(tile.ds_rows + k * kRowWords + from / Mac::kElements, 0, bytes);
    }
  };
  const int from = part.v_begin * kLanes, to = part.v_end * kLanes;
  clear_queries(from / kQueryStep * kQueryStep, from);
  clear_queries(to, static_cast<int>(whole(to, kQueryStep)));
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
