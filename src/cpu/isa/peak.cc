#include "cpu/isa/peak.h"

#include <algorithm>
#include <chrono>

#include "cpu/isa/isa.h"
#include "cpu/isa/order.h"
#include "cpu/isa/peak_loop.h"
#include "polyhead/kernels.h"

namespace polyhead {
namespace cpu {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

#define ROW(name, features) name::peak_loop,
constexpr PeakLoop* kPeakLoops[] = {POLYHEAD_ISAS(ROW)};
#undef ROW

}  // namespace

bool multiplies_bf16(Isa isa) {
  float sink = 0;
  return kPeakLoops[static_cast<int>(isa)](DType::kBFloat16, 1, &sink) != 0;
}

double peak_flops(Isa isa, DType dtype, int64_t rounds) {
  PeakLoop* loop = kPeakLoops[static_cast<int>(isa)];
  float sink = 1e-3f;
  const auto start = std::chrono::steady_clock::now();
  double flops = loop(dtype, rounds, &sink);
  if (flops == 0) flops = loop(DType::kFloat32, rounds, &sink);
  return flops / seconds_since(start);
}

}  // namespace cpu

double measure_peak_gflops(DType dtype, double seconds) {
  const cpu::Isa best = *std::find_if(std::begin(cpu::isa_order().isas), std::end(cpu::isa_order().isas), cpu::has);
  constexpr int64_t kRounds = 100'000;
  double flops = 0;
  const auto start = std::chrono::steady_clock::now();
  do {
    flops = std::max(flops, cpu::peak_flops(best, dtype, kRounds));
  } while (cpu::seconds_since(start) < seconds);
  return flops / 1e9;
}

}  // namespace polyhead
