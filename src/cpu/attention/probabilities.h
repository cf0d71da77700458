// The second pass over the keys of a finished tile, where weights or their column sums are asked for: P = exp2(S - m) / l
// with the tile's final m and l.
#pragma once

#include "cpu/attention/key_block.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// p[key][query] -> normalised; 0 where hidden, also in a row that is NaN.
void normalise(float* p, const Score& score, const BlockView& view, const float* l, const Part& part) {
  for (int v = part.v_begin; v < part.v_end; ++v) {
    const F l_v = load(l + v * kLanes), reciprocal = broadcast(1.0f) / l_v;
    for (int k = part.begin; k < part.end; ++k) {
      float* at = p + k * kTile + v * kLanes;
      store(at, divide(load(at), l_v, reciprocal));
    }
    if (!any(negate(equal(l_v, l_v)))) continue;
    for (int q = v * kLanes; q < (v + 1) * kLanes; ++q) {
      for (int k = part.begin; k < part.end; ++k) {
        if (l[q] != l[q] && score.hidden(view, k, q)) p[k * kTile + q] = 0;
      }
    }
  }
}

void add_columns(const ForwardTask& task, const float* p, int64_t first, int num_queries, const Part& part) {
  for (int k = part.begin; k < part.end; ++k) {
    F sum = load(task.columns + (first + k) * kLanes);
    for (int v = part.v_begin; v < part.v_end && v * kLanes < num_queries; ++v) {
      const int rows = num_queries - v * kLanes < kLanes ? num_queries - v * kLanes : kLanes;
      const F p_v = load(p + k * kTile + v * kLanes);
      sum = sum + (rows == kLanes ? p_v : select(mask_from_bits((1u << rows) - 1), p_v, broadcast(0.0f)));
    }
    store(task.columns + (first + k) * kLanes, sum);
  }
}

// After dropout and its scale.
void drop(float* p, const Dropout& dropout, const uint16_t (*kept)[kVecs], const Part& part) {
  for (int k = part.begin; k < part.end; ++k) {
    for (int v = part.v_begin; v < part.v_end; ++v) {
      float* at = p + k * kTile + v * kLanes;
      store(at, load(at) * select(mask_from_bits(kept[k][v]), broadcast(dropout.scale), broadcast(0.0f)));
    }
  }
}

// Queries [q_begin, q_end) of p[key][query], times `factor`, to the rows of problem.attn_weights that start at `row`.
void store_probabilities(const Problem& problem, int64_t row, const float* p, int64_t num_keys, int q_begin, int q_end,
                         float factor) {
  for (int q = q_begin; q < q_end; q += kLanes) {
    for (int64_t k = 0; k < num_keys; k += kLanes) {
      const int n = num_keys - k < kLanes ? static_cast<int>(num_keys - k) : kLanes;
      F block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        block[i] = i < n ? load(p + (k + i) * kTile + q) * broadcast(factor) : broadcast(0.0f);
      }
      transpose(block);
      for (int r = 0; r < kLanes && q + r < q_end; ++r) {
        store_elements(problem.attn_weights, problem.dtype,
                       row + (q + r) * problem.weights_stride_q + k * problem.weights_stride_k,
                       problem.weights_stride_k, block[r], n);
      }
    }
  }
}

template <class Mac>
void second_pass(const Head& head, Tile& tile) {
  const ForwardTask& task = head.task;
  const Problem& problem = head.problem;
  const int64_t row = task.b * problem.weights_stride_b + task.h * problem.weights_stride_h +
                      tile.first_query * problem.weights_stride_q;
  alignas(64) float l[kTile];
  for (int q = 0; q < kTile && problem.softmax; ++q) {
    l[q] = tile.state.l[q];
    if (l[q] != 0.0f) continue;
    l[q] = q < tile.num_queries && sees_only_minus_infinity(head, tile, q) ? __builtin_nanf("") : 1.0f;
  }
  const int64_t end = tile.ranges.last();
  int64_t first = next_block(head, &tile, 1, tile.ranges.first() / kBlock * kBlock, end);
  for (; first < end; first = next_block(head, &tile, 1, first + kBlock, end)) {
    const KeyBlock block = load_block<Mac>(head, first);
    const TileView t = view_block(head, tile, block.first, block.num_keys);
    if (t.begin >= t.end) continue;
    float* p = head.scratch->p;
    for_each_part(t, [&](const Part& computed, const BlockView& view) {
      BlockView undropped = view;
      undropped.kept = nullptr;
      score_keys<Mac, Float32>(head, tile, block, undropped, computed, false);
      Part part = computed;
      if (part.end > block.num_keys) part.end = block.num_keys;
      if (problem.softmax) normalise(p, head.score, t.view, l, part);
      if (task.columns != nullptr) add_columns(task, p, first, tile.num_queries, part);
      if (view.kept != nullptr) drop(p, problem.dropout, view.kept, part);
      if (task.attn_weights) {
        const int q_end = part.v_end * kLanes < tile.num_queries ? part.v_end * kLanes : tile.num_queries;
        store_probabilities(problem, row + (first + part.begin) * problem.weights_stride_k, p + part.begin * kTile,
                            part.end - part.begin, part.v_begin * kLanes, q_end, 1);
      }
      if (task.mean == nullptr) return;
      for (int k = part.begin; k < part.end; ++k) {
        for (int q = part.v_begin * kLanes; q < part.v_end * kLanes; ++q) {
          task.mean[(first + k) * kTile + q] += p[k * kTile + q];
        }
      }
    });
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
