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

#ifdef POLYHEAD_HAS_TMM
double multiply_registers(int64_t rounds, float* sink) {
  const TmmInUse tmm;
  tmm_zero<0>();
  tmm_zero<1>();
  tmm_zero<2>();
  tmm_zero<3>();
  for (int64_t r = 0; r < rounds; ++r) {
    tmm_dot_bf16<0, 2, 3>();
    tmm_dot_bf16<1, 2, 3>();
  }
  alignas(64) float sums[16 * 16];
  tmm_store<0>(sums, 16);
  *sink = sums[0];
  return 2.0 * 16 * 16 * 32 * 2 * static_cast<double>(rounds);
}
#endif

}  // namespace

double peak_loop(DType dtype, int64_t rounds, float* sink) {
  if (dtype == DType::kFloat32) return multiply_add<Float32>(rounds, sink);
#if defined(POLYHEAD_HAS_TMM)
  if (dtype == DType::kBFloat16) return multiply_registers(rounds, sink);
#elif defined(POLYHEAD_HAS_BF16_DOT)
  if (dtype == DType::kBFloat16) return multiply_add<BFloat16Pair>(rounds, sink);
#endif
  return 0;
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
