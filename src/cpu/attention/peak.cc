// What this machine can do at best.
#include <algorithm>
#include <chrono>
#include <cstdint>

#include "cpu/attention/functions.h"
#include "cpu/isa/isa.h"
#include "polyhead/kernels.h"

namespace polyhead {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

const cpu::IsaFunctions& best_functions() {
#if defined(__x86_64__)
  if (cpu::isa().avx512bf16) return cpu::avx512bf16::kFunctions;
  if (cpu::isa().avx512) return cpu::avx512::kFunctions;
  if (cpu::isa().avx2) return cpu::avx2::kFunctions;
#endif
  return cpu::generic::kFunctions;
}

}  // namespace

double measure_peak_gflops(DType dtype, double seconds) {
  const cpu::IsaFunctions& functions = best_functions();
  constexpr int64_t kRounds = 100'000;
  double best = 0;
  const auto start = std::chrono::steady_clock::now();
  do {
    float sink = 1e-3f;
    const auto round_start = std::chrono::steady_clock::now();
    double flops = functions.peak_loop(dtype, kRounds, &sink);
    if (flops == 0) flops = functions.peak_loop(DType::kFloat32, kRounds, &sink);
    best = std::max(best, flops / seconds_since(round_start) / 1e9);
  } while (seconds_since(start) < seconds);
  return best;
}

}  // namespace polyhead
