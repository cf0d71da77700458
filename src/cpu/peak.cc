// What this machine can do at best: the denominators of every benchmark.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "cpu/isa.h"
#include "cpu/isa_functions.h"
#include "cpu/kernels.h"

namespace polyhead::cpu {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

const IsaFunctions& best_functions() {
#if defined(__x86_64__)
  if (isa().avx512bf16) return avx512bf16::kFunctions;
  if (isa().avx512) return avx512::kFunctions;
  if (isa().avx2) return avx2::kFunctions;
#endif
  return generic::kFunctions;
}

}  // namespace

double measure_peak_gflops(DType dtype, double seconds) {
  const IsaFunctions& functions = best_functions();
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

double measure_read_gbytes(double seconds) {
  const std::vector<uint64_t> buffer(32u << 20, 1);  // 256 MiB
  double best = 0;
  volatile uint64_t sink = 0;
  const auto start = std::chrono::steady_clock::now();
  do {
    const auto round_start = std::chrono::steady_clock::now();
    uint64_t sum[8] = {};
    for (size_t i = 0; i < buffer.size(); i += 8) {
      for (size_t j = 0; j < 8; ++j) sum[j] += buffer[i + j];
    }
    for (const uint64_t s : sum) sink = sink + s;
    best = std::max(best, static_cast<double>(buffer.size() * sizeof(uint64_t)) / seconds_since(round_start) / 1e9);
  } while (seconds_since(start) < seconds);
  return best;
}

}  // namespace polyhead::cpu
