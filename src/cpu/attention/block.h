// A block of keys as a tile of queries works on it in forward: loading it, and its weights.
//   Q^T [D][kTile]   K, V [kBlock][D]   S^T, P^T [kBlock][kTile]   O^T [Dv][kTile]   m, l [kTile]
#pragma once

#include "cpu/attention/functions.h"
#include "cpu/attention/softmax.h"
#include "cpu/attention/view.h"
#include "cpu/isa/rows.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

struct Tile : QueryTile {
  TileState state;
  float* query;      // Q^T, words
  bool some_hidden;  // in a block that was computed
};

struct Scratch {
  Tile tile[kMaxTiles];
  alignas(64) float p[kBlock * kTile];
  ViewScratch view;
};

constexpr size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

// The keys and values of one block, as words that the microkernel can read: in place, or copied.
struct Block {
  int64_t first;
  int num_keys;
  Words key, value;
};

struct Head : HeadOptions {
  const ForwardTask& task;
  Rows key, value;
  Scratch* scratch;
  float *key_copy, *value_copy;
  bool rounded_weights;  // P is bfloat16 where it multiplies V
  bool careful;          // NaN or inf among hidden values: see add_not_finite
};

template <class Mac>
Block load_block(const Head& head, int64_t first) {
  const Problem& problem = head.problem;
  const int64_t left = head.task.sequence.len_k - first;
  Block block{first, left < kBlock ? static_cast<int>(left) : kBlock, {}, {}};
  const int padded = (block.num_keys + kMicroRows - 1) / kMicroRows * kMicroRows;
  block.key = rows_as_words<Mac>(head.key_copy, head.key, first, block.num_keys, padded, problem.head_dim);
  block.value = values_as_words<Mac>(head.value_copy, head.value, first, block.num_keys, padded, problem.head_dim_v,
                                     head.careful);
  return block;
}

// P^T of one part, in words of PMac.
template <class Mac, class PMac>
void score_keys(const Head& head, Tile& tile, const Block& block, const BlockView& view, const Part& part) {
  const int64_t words = words_of(head.problem.head_dim, Mac::kElements);
  for_each_product<Mac>(
      tile.query, words, block.key, part, [&]<int kRows, int kVecs_>(F(&s)[kRows][kVecs_], int key, int lane) {
        softmax_step<PMac>(s, head.scratch->p, tile.state, head.rule, view, key, lane, head.problem.head_dim_v);
      });
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
