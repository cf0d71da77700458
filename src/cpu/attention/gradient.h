// P and dS of a tile of queries and a block of keys in backward, and what they are made from.
//   Q^T [D][kTile]   dO^T [Dv][kTile]   K [kBlock][D]   V [kBlock][Dv]   P^T, dS^T [kBlock][kTile]
#pragma once

#include "cpu/attention/functions.h"
#include "cpu/attention/view.h"
#include "cpu/isa/rows.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

struct GradientTile : QueryTile {
  float *query, *grad_out;             // Q^T and dO^T, words along the dims
  alignas(64) float logsumexp[kTile];  // +inf where no key is seen, which makes P 0
  alignas(64) float delta[kTile];      // sum over Dv of dO * O, less the gradient of logsumexp
};

// What every tile of a head reads.
struct GradientHead : HeadOptions {
  const BackwardProblem& gradients;
  Rows query, out, grad_out, key, value;  // of the sequence
  float *key_copy, *value_copy;
  float* p;      // P^T of the tile at hand
  Later* later;  // dQ of queries whose dS is there
};

// Element [key][query] of P^T or dS^T, words along the queries.
inline float element(const float* rows, int elements, int key, int query) {
  if (elements == 1) return rows[key * kTile + query];
  const uint32_t word = uint32_t{reinterpret_cast<const uint16_t*>(rows)[key * kTile + query]} << 16;
  float x;
  __builtin_memcpy(&x, &word, sizeof x);
  return x;
}

// Columns of the sums of a key: what add_keys asks for, of registers tmm 16.
inline int64_t whole_vectors(int64_t dim) { return whole(dim, kTmm ? 16 : kLanes); }

inline bool is_finite(float x) { return x - x == 0.0f; }

inline float number_at(const Rows& x, int64_t row, int64_t column) {
  alignas(64) float lanes[kLanes];
  store(lanes, load_columns(x, row, column, 1));
  return lanes[0];
}

// Words are pairs of bfloat16 where all operands are: float32 grad_out and out are not rounded for it.
inline bool in_bf16_pairs(const BackwardProblem& gradients) {
  return gradients.forward.dtype == DType::kBFloat16 && gradients.grad_out.dtype == DType::kBFloat16;
}

inline GradientHead gradient_head(const BackwardProblem& gradients, const Sequence& s, int64_t b, int64_t h,
                                  ViewMemory* view_memory) {
  const Problem& problem = gradients.forward;
  const int64_t kv_head = h / problem.group;
  return {{problem, s, b, h, view_memory},
          gradients,
          rows_of(problem.query, b, h, s.first_q),
          rows_of(problem.out, b, h, s.first_q),
          rows_of(gradients.grad_out, b, h, s.first_q),
          rows_of(problem.key, b, kv_head, s.first_k),
          rows_of(problem.value, b, kv_head, s.first_k),
          nullptr,
          nullptr,
          nullptr,
          nullptr};
}

#ifdef POLYHEAD_HAS_TMM
// Of O dO^T for 16 queries at a time, of which the diagonal is taken: the order of registers tmm is theirs alone.
template <class Mac>
void multiply_diagonals(float* delta, const float* grad_out, const Rows& out, int num_rows, int64_t dim,
                        float* memory) {
  alignas(64) float sums[kTmmRows * kTmmRows];
  for (int q = 0; q < kTile; q += kTmmRows) {
    tmm_zero<0>();
    for (int64_t d = 0; d < dim; d += kDimStep) {
      const int rows = num_rows - q < kTmmRows ? num_rows - q : kTmmRows;
      copy_rows<Mac>(memory, out.from(0, d), q, rows, kTmmRows, dim - d < kDimStep ? dim - d : kDimStep);
      tmm_load<4>(memory, kTmmRows);
      tmm_load<6>(grad_out + d / Mac::kElements * kTile + q, kTile);
      tmm_dot_bf16<0, 4, 6>();
    }
    tmm_store<0>(sums, kTmmRows);
    for (int i = 0; i < kTmmRows; ++i) delta[q + i] = sums[i * kTmmRows + i];
  }
}
#endif

// delta[q] = sum over Dv of dO * O, in the order in which dP = dO V^T is summed: where a query sees one key, O is that
// key's value, and dS = P (dP - delta) becomes exactly 0. grad_out is dO^T in words; `memory` holds kTileFloats.
template <class Mac>
void multiply_rows(float* delta, const float* grad_out, const Rows& out, int num_rows, int64_t dim, float* memory) {
#ifdef POLYHEAD_HAS_TMM
  multiply_diagonals<Mac>(delta, grad_out, out, num_rows, dim, memory);
#else
  F sum[kVecs];
  for (int v = 0; v < kVecs; ++v) sum[v] = broadcast(0.0f);
  for (int64_t d = 0; d < dim; d += kBlock) {
    const int64_t columns = dim - d < kBlock ? dim - d : kBlock;
    transpose_rows<Mac>(memory, out.from(0, d), num_rows, columns);
    for (int64_t word = 0; word < words_of(columns, Mac::kElements); ++word, grad_out += kTile) {
      for (int v = 0; v < kVecs; ++v) {
        sum[v] = Mac::step(sum[v], load(grad_out + v * kLanes), load(memory + word * kTile + v * kLanes));
      }
    }
  }
  for (int v = 0; v < kVecs; ++v) store(delta + v * kLanes, sum[v]);
#endif
}

// Q^T, dO^T and, of a softmax, the statistics of a tile whose place and ranges are set. `memory` holds kTileFloats.
template <class Mac>
void load_tile(const GradientHead& head, GradientTile& tile, float* memory) {
  const Problem& problem = head.problem;
  const BackwardProblem& gradients = head.gradients;
  const int n = tile.num_queries;
  transpose_rows<Mac>(tile.query, head.query.from(tile.first_query, 0), n, problem.head_dim);
  transpose_rows<Mac>(tile.grad_out, head.grad_out.from(tile.first_query, 0), n, problem.head_dim_v);
  if (!problem.softmax) return;
  if (gradients.delta.data == nullptr) {
    multiply_rows<Mac>(tile.delta, tile.grad_out, head.out.from(tile.first_query, 0), n, problem.head_dim_v, memory);
  }
  const auto number = [&](const Statistic& x, int q) {
    return *at(x, head.b, head.h, head.sequence.first_q + tile.first_query + q);
  };
  for (int q = 0; q < kTile; ++q) {
    tile.logsumexp[q] = kInfinity;
    if (q >= n) continue;
    const float l = number(problem.logsumexp, q);
    if (l != -kInfinity) tile.logsumexp[q] = l;
    if (gradients.delta.data != nullptr) tile.delta[q] = number(gradients.delta, q);
    if (gradients.grad_logsumexp.data != nullptr) tile.delta[q] -= number(gradients.grad_logsumexp, q);
  }
  for (int q = n; q < kTile; ++q) tile.delta[q] = 0;
}

template <class Mac>
KeyBlock load_keys(const GradientHead& head, int64_t first) {
  const int64_t left = head.sequence.len_k - first;
  KeyBlock block{first, left < kBlock ? static_cast<int>(left) : kBlock, {}, {}};
  const int64_t padded = end_of_parts(block.num_keys);
  block.key = rows_as_words<Mac>(head.key_copy, head.key, first, block.num_keys, padded, head.problem.head_dim);
  block.value = rows_as_words<Mac>(head.value_copy, head.value, first, block.num_keys, padded, head.problem.head_dim_v);
  return block;
}

// view_block, where queries that are not there count as seeing nothing unless num_queries is a multiple of `whole`; of
// kTile where no softmax makes their P 0.
inline TileView view_present(const HeadOptions& head, const QueryTile& tile, const KeyBlock& block, int whole) {
  TileView t = view_block(head, tile, block.first, block.num_keys);
  if (t.begin >= t.end || tile.num_queries % (head.problem.softmax ? whole : kTile) == 0) return t;
  BlockRanges& ranges = head.view_memory->ranges;
  if (t.all) block_ranges(ranges, tile.ranges, block.first, kBlock);
  ranges.all_begin = ranges.all_end = 0;
  t.all = false;
  t.view.ranges = &ranges;
  return t;
}

// Of a softmax, or where the scores are the weights, and of each way to scores: functions of their own, as in key_block.h
// (Xeon: 1 % of backward where the scores are the products).
template <class Mac, bool kSoftmax, ScoreWay kWay>
void weigh_part_of(const GradientHead& head, const GradientTile& tile, const KeyBlock& block, const BlockView& view,
                   const Part& part) {
  const Score& score = head.score;
  const F to_natural = broadcast(score.to_natural);
  const bool masked = kWay != ScoreWay::kProducts && score.hides(view);
  float* const p_rows = head.p;  // here and below: after a store the compiler would load it anew, see weigh_keys
  const auto weigh = [=, &score, &tile, &view]<int kRows, int kVecs_>(F(&s)[kRows][kVecs_], int key, int lane) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs_; ++v) {
      const int at = lane + v * kLanes;
      const F l = load(tile.logsumexp + at);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        F p = s[r][v];
        if constexpr (kSoftmax) {
          p = fms(p, to_natural, l);
          p = Mac::kElements == 2 ? exp_of_pair(p) : exp_of_weight(p);
        }
        if (masked) p = select(score.sees<kWay>(view, key + r, at), p, broadcast(0.0f));
        store(p_rows + (key + r) * kTile + at, p);
      }
    }
  };
  const int64_t words = words_of(head.problem.head_dim, Mac::kElements);
  const auto apply = [&score, &view, memory = &head.view_memory->options ]<int kRows, int kVecs_>(
      F(&s)[kRows][kVecs_], int key, int lane) __attribute__((always_inline)) {
    score.template apply_and_keep<kWay>(s, view, key, lane, *memory);
  };
  if constexpr (kWay == ScoreWay::kAny) {
    if (score.by_program) {
      return score_by_program<Mac, kMostSums>(head, tile.query, words, block.key, view, part, *head.later, apply, weigh,
                                              [](int, int) {});
    }
  }
  for_each_product<Mac, kMostSums>(
      tile.query, words, block.key, part, *head.later,
      [apply, weigh]<int kRows, int kVecs_>(F(&s)[kRows][kVecs_], int key, int lane) {
        apply(s, key, lane);
        weigh(s, key, lane);
      },
      [](int, int) {});
}

// head.p = P^T = exp(S - L), or S where there is no softmax, undropped, of one part; 0 where hidden.
template <class Mac>
void weigh_part(const GradientHead& head, const GradientTile& tile, const KeyBlock& block, const BlockView& view,
                const Part& part) {
  if (!head.problem.softmax) return weigh_part_of<Mac, false, ScoreWay::kAny>(head, tile, block, view, part);
  head.score.with_way(view, [&]<ScoreWay kWay>() { weigh_part_of<Mac, true, kWay>(head, tile, block, view, part); });
}

// kDrops: there may be dropout.
template <class Mac, bool kSoftmax, ScoreWay kWay, bool kDrops, class Take, class Done>
void differentiate_part_of(const GradientHead& head, const GradientTile& tile, const KeyBlock& block,
                           const BlockView& view, const Part& part, bool with_values, const Take& take,
                           const Done& done) {
  const int64_t words = with_values ? words_of(head.problem.head_dim_v, Mac::kElements) : 0;
  const bool masked = kWay != ScoreWay::kProducts && head.score.hides(view), dropped = kDrops && view.kept != nullptr;
  const F drop_scale = broadcast(head.problem.dropout.scale);
  const float* const p_rows = head.p;
  const auto finish = [=, &head, &tile, &view]<int kRows, int kVecs_>(F(&dp)[kRows][kVecs_], int key, int lane) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs_; ++v) {
      const int at = lane + v * kLanes;
      const F delta = load(tile.delta + at);
      F p[kRows], ds[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        p[r] = load(p_rows + (key + r) * kTile + at);
        F dp_r = dp[r][v], kept = broadcast(1.0f);
        if (dropped) {
          // Products, not selections: NaN stays NaN.
          const M keep = mask_from_bits(view.kept[key + r][at / kLanes]);
          kept = select(keep, kept, broadcast(0.0f));
          dp_r = dp_r * select(keep, drop_scale, broadcast(0.0f));
        }
        ds[r] = dp_r;
        if constexpr (kSoftmax) ds[r] = p[r] * (dp_r - delta);
        if (masked) ds[r] = select(head.score.sees<kWay>(view, key + r, at), ds[r], broadcast(0.0f));
        if (dropped) p[r] = p[r] * kept;
      }
      take(p, ds, key, at);
    }
  };
  for_each_product<Mac, kMostSums>(tile.grad_out, words, block.value, part, *head.later, finish, done);
}

// dS = P (dP - delta), or dP where there is no softmax, and dP = dropout(dO V^T), of one part after weigh_part: calls
// take(p, ds, key, at) for kRows keys of kLanes queries, p being after dropout, without its scale. Without `with_values` ds
// means nothing. done(v_begin, v_end) as for_each_product calls it.
template <class Mac, class Take, class Done>
void differentiate_part(const GradientHead& head, const GradientTile& tile, const KeyBlock& block,
                        const BlockView& view, const Part& part, bool with_values, const Take& take, const Done& done) {
  if (!head.problem.softmax) {
    return differentiate_part_of<Mac, false, ScoreWay::kAny, true>(head, tile, block, view, part, with_values, take,
                                                                   done);
  }
  head.score.with_way(view, [&]<ScoreWay kWay>() {
    if (kWay != ScoreWay::kAny && view.kept == nullptr) {
      return differentiate_part_of<Mac, true, kWay, false>(head, tile, block, view, part, with_values, take, done);
    }
    differentiate_part_of<Mac, true, ScoreWay::kAny, true>(head, tile, block, view, part, with_values, take, done);
  });
}

// The same, where ds is that of the scores that come to the program, if there is one, strip by strip as score_by_program;
// what it gives to captures is added to their sums.
template <class Mac, class Take, class Done>
void differentiate_scores(const GradientHead& head, const GradientTile& tile, const KeyBlock& block,
                          const BlockView& view, const Part& part, bool with_values, const CaptureSums& captures,
                          const Take& take, const Done& done) {
  if (!with_values || (!head.score.changes_gradient() && captures.sums == nullptr)) {
    return differentiate_part<Mac>(head, tile, block, view, part, with_values, take, done);
  }
  const Options::Memory& options = head.view_memory->options;
  float* const gradients = program_memory(options).gradients;
  head.score.prepare_gradients_of_program(view, options, part.begin, part.end, captures.sums != nullptr);
  const bool whole = part.v_begin == 0 && part.v_end == kVecs, same = !head.score.changes_gradient();
  for_each_strip(part, [&](const Part& strip) {
    // Sums are those of all queries of a tile.
    for (int i = strip.begin * kTile; !whole && i < strip.end * kTile; i += kLanes)
      store(gradients + i, broadcast(0.0f));
    differentiate_part<Mac>(
        head, tile, block, view, strip, true,
        [&]<int kRows>(F(&p)[kRows], F(&ds)[kRows], int key, int at) {
          for (int r = 0; r < kRows; ++r) store(gradients + (key + r) * kTile + at, ds[r]);
          if (same) return take(p, ds, key, at);
          for (int r = 0; r < kRows; ++r) store(head.p + (key + r) * kTile + at, p[r]);
        },
        [](int, int) {});
    head.score.differentiate_program(view, options, strip.begin, strip.end, captures);
    if (same) return;
    for_each_row_group(gradients, strip, [&]<int kRows, int kVecs_>(F(&rows)[kRows][kVecs_], int key, int lane) {
      for (int v = 0; v < kVecs_; ++v) {
        const int at = lane + v * kLanes;
        F p[kRows], ds[kRows];
        for (int r = 0; r < kRows; ++r) {
          p[r] = load(head.p + (key + r) * kTile + at);
          ds[r] = rows[r][v];
        }
        take(p, ds, key, at);
      }
    });
  });
  for_each_done(part, done);
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
