#include "cpu/isa/peak_loop.h"

#include "cpu/isa/tile.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Fails to compile where cmake/per_isa.cmake names a set that list.h does not have.
static_assert(Isa::POLYHEAD_ISA <= Isa::generic);

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

}  // namespace polyhead::cpu::POLYHEAD_ISA
