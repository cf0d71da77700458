// The table of one instruction set, and its peak.
#include "cpu/attention/functions.h"

#include "cpu/isa/tile.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

template <class Mac>
double multiply_add(int64_t rounds, float* sink) {
  constexpr int kSums = 12;
  F sum[kSums];
#pragma GCC unroll 12
  for (int i = 0; i < kSums; ++i) sum[i] = broadcast(0.0f);
  F a = broadcast(*sink), b = broadcast(*sink);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sum[i] = Mac::step(sum[i], a, b);
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) keep_in_register(sum[i]);
  }
  F total = sum[0];
#pragma GCC unroll 12
  for (int i = 1; i < kSums; ++i) total = total + sum[i];
  alignas(64) float lanes[kLanes];
  store(lanes, total);
  *sink = lanes[0];
  return 2.0 * Mac::kElements * kLanes * kSums * static_cast<double>(rounds);
}

}  // namespace

double peak_loop(DType dtype, int64_t rounds, float* sink) {
  if (dtype == DType::kFloat32) return multiply_add<Float32>(rounds, sink);
#ifdef POLYHEAD_HAS_BF16_DOT
  if (dtype == DType::kBFloat16) return multiply_add<BFloat16Pair>(rounds, sink);
#endif
  return 0;
}

const IsaFunctions kFunctions = {forward_scratch_bytes,
                                 forward_tiles,
                                 decode_scratch_bytes,
                                 decode_partial_bytes,
                                 decode_chunk,
                                 decode_merge,
                                 tiny_scratch_bytes,
                                 tiny_heads,
                                 backward_scratch_bytes,
                                 backward_sum_floats,
                                 backward_head,
                                 backward_keys,
                                 backward_queries,
                                 score_scratch_bytes,
                                 add_score_gradients,
                                 store_score_gradients,
                                 tiny_backward_scratch_bytes,
                                 tiny_backward_heads,
                                 store_mean,
                                 kLanes,
                                 peak_loop};

}  // namespace polyhead::cpu::POLYHEAD_ISA
