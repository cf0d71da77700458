// From products of queries and keys to scores: scale, softcap, ALiBi, mask and bias, -inf where hidden.
#pragma once

#include "cpu/attention/mask.h"
#include "cpu/isa/elementary.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// What one head does to its products.
struct ScoreRule {
  bool natural;  // products are scaled at once: for softcap, ALiBi, mask or bias, or because scale is not positive
  float scale;
  float factor;  // what then brings a score to base 2; positive
  float softcap, slope;
};

inline ScoreRule score_rule(const Problem& problem, int64_t b, int64_t h) {
  ScoreRule rule{};
  rule.scale = problem.scale;
  rule.softcap = problem.softcap;
  if (problem.slopes != nullptr) rule.slope = problem.slopes[b * problem.slopes_stride_b + h * problem.slopes_stride_h];
  rule.natural = problem.softcap > 0 || problem.slopes != nullptr || problem.mask.data != nullptr ||
                 problem.bias.data != nullptr || !(problem.scale > 1e-6f);
  rule.factor = rule.natural ? kLog2E : problem.scale * kLog2E;
  return rule;
}

// How one tile sees one block of keys. Null: every query sees every key / nothing is added / nothing is dropped.
struct BlockView {
  const BlockRanges* ranges = nullptr;
  const float* additive = nullptr;
  bool additive_shared = false;             // one row for all queries: additive[key]
  const uint16_t (*kept)[kVecs] = nullptr;  // [key][vector]
  const float* diagonal = nullptr;          // ALiBi: position of each query, relative to the block's first key
};

// Scores as the contract says: scale, softcap, ALiBi, bias; -inf where hidden. s[r][v]: key + r, lanes lane + v * kLanes.
template <int kRows, int kVecs_>
inline void apply_rule(F (&s)[kRows][kVecs_], const ScoreRule& rule, const BlockView& view, int key, int lane) {
#pragma GCC unroll 8
  for (int v = 0; v < kVecs_; ++v) {
    const int at = lane + v * kLanes;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      F x = s[r][v];
      if (rule.natural) {
        x = x * broadcast(rule.scale);
        if (rule.softcap > 0) x = broadcast(rule.softcap) * tanh(x / broadcast(rule.softcap));
        F add = broadcast(0.0f);
        if (view.additive != nullptr) {
          add = view.additive_shared ? broadcast(view.additive[key + r]) : load(view.additive + (key + r) * kTile + at);
        }
        if (view.diagonal != nullptr) {
          const F distance = absolute(load(view.diagonal + at) - broadcast(static_cast<float>(key + r)));
          x = x - broadcast(rule.slope) * distance;
        }
        x = select(equal(add, broadcast(-kInfinity)), add, x + add);
      }
      if (view.ranges != nullptr) {
        const I index = broadcast_int(key + r);
        const M seen = both(less_int(index, load_int(view.ranges->end + at)),
                            negate(less_int(index, load_int(view.ranges->begin + at))));
        x = select(seen, x, broadcast(-kInfinity));
      }
      s[r][v] = x;
    }
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
