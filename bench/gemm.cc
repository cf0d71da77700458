// Products of the layer's sizes: GFLOP/s, and the fraction of the machine's peak.
//
//   gemm                    the table below on one thread
//   gemm THREADS [DTYPE]    likewise
//   gemm -                  for each line "dtype direction m n k threads seconds" on stdin, the fastest call in ms
//
// Directions: forward (B packed before), unpacked (forward with B as it lies), data (B transposed, as it lies) and
// weights (A transposed, K = number of rows of the layer).
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "contract/linear.h"
#include "core/dtype.h"
#include "polyhead/kernels.h"

namespace {

using polyhead::DType;
namespace linear = polyhead::linear;

struct Size {
  int64_t m, n, k;
};

// Memory aligned to 64.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes + 64) {}
  char* data() { return bytes_.data() + (64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64; }

 private:
  std::vector<char> bytes_;
};

Buffer random_numbers(int64_t count, DType dtype) {
  Buffer buffer(static_cast<size_t>(count) * polyhead::dtype_size_bytes(dtype));
  uint32_t state = 1;
  for (int64_t n = 0; n < count; ++n) {
    state = state * 1664525 + 1013904223;
    polyhead::store_element(buffer.data(), dtype, n, static_cast<double>(state >> 8) / (1 << 23) - 1);
  }
  return buffer;
}

// The CPU's kernels give no error.
void expect_ok(const polyhead::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

double best_seconds(const linear::Kernel& kernel, const std::string& direction, const Size& size, DType dtype,
                    polyhead::Executor& executor, double seconds) {
  const auto [m, n, k] = size;
  Buffer a = random_numbers(m * k, dtype), b = random_numbers(k * n, dtype), c = random_numbers(m * n, dtype);
  linear::GemmDesc desc{m, n, k, dtype, direction == "forward", direction == "weights"};
  linear::GemmArgs args;
  args.a = direction == "weights" ? linear::matrix(a.data(), dtype, k, m).transposed()
                                  : linear::matrix(a.data(), dtype, m, k);
  args.b =
      direction == "data" ? linear::matrix(b.data(), dtype, n, k).transposed() : linear::matrix(b.data(), dtype, k, n);
  args.c = linear::matrix(c.data(), dtype, m, n);
  Buffer packed(desc.prepacked ? kernel.packed_bytes(k, n, dtype).value() : 0);
  if (desc.prepacked) expect_ok(kernel.pack(args.b, packed.data(), executor));
  args.prepacked = packed.data();
  Buffer workspace(kernel.gemm_workspace_bytes(desc, executor.num_threads()).value());
  args.workspace = workspace.data();
  double best = 1e9;
  const auto start = std::chrono::steady_clock::now();
  std::chrono::duration<double> elapsed{};
  do {
    const auto call_start = std::chrono::steady_clock::now();
    expect_ok(kernel.gemm(desc, args, executor));
    const auto end = std::chrono::steady_clock::now();
    best = std::min(best, std::chrono::duration<double>(end - call_start).count());
    elapsed = end - start;
  } while (elapsed.count() < seconds);
  return best;
}

bool parse_dtype(const char* name, DType* dtype) {
  for (const DType known : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (std::strcmp(name, polyhead::dtype_name(known)) == 0) return *dtype = known, true;
  }
  return false;
}

int serve() {
  char dtype_text[32], direction[32];
  Size size{};
  int threads = 1;
  double seconds = 0;
  while (std::scanf("%31s %31s %ld %ld %ld %d %lf", dtype_text, direction, &size.m, &size.n, &size.k, &threads,
                    &seconds) == 7) {
    DType dtype;
    if (!parse_dtype(dtype_text, &dtype)) return std::fprintf(stderr, "gemm: unknown dtype %s\n", dtype_text), 1;
    const auto kernel = linear::choose_kernel(dtype, "", polyhead::Device::kCpu);
    if (!kernel.ok()) return std::fprintf(stderr, "gemm: %s\n", kernel.status().message().c_str()), 1;
    const std::unique_ptr<polyhead::Executor> executor(polyhead::new_thread_pool(threads));
    std::printf("%.6f\n", 1e3 * best_seconds(**kernel, direction, size, dtype, *executor, seconds));
    std::fflush(stdout);
  }
  return 0;
}

int table(int threads, DType dtype) {
  const auto kernel = linear::choose_kernel(dtype, "", polyhead::Device::kCpu);
  if (!kernel.ok()) return std::fprintf(stderr, "gemm: %s\n", kernel.status().message().c_str()), 1;
  const std::unique_ptr<polyhead::Executor> executor(polyhead::new_thread_pool(threads));
  const double peak = polyhead::measure_peak_gflops(dtype, 0.3) * threads;
  std::printf("%s %s, %d threads, peak %.0f GFLOP/s\n", (*kernel)->name, polyhead::dtype_name(dtype), threads, peak);
  std::printf("%10s %6s %6s %6s %10s %8s\n", "", "M", "N", "K", "GFLOP/s", "of peak");
  const auto row = [&](const char* direction, const Size& size) {
    const double flops = 2.0 * static_cast<double>(size.m) * static_cast<double>(size.n) * static_cast<double>(size.k);
    const double gflops = flops / best_seconds(**kernel, direction, size, dtype, *executor, 0.2) / 1e9;
    std::printf("%10s %6ld %6ld %6ld %10.1f %7.1f%%\n", direction, size.m, size.n, size.k, gflops, 100 * gflops / peak);
    std::fflush(stdout);
  };
  constexpr int64_t kSizes[][2] = {{512, 512}, {1024, 1024}, {4096, 1024}, {1024, 4096}};
  for (const int64_t m : {1, 8, 64, 384, 3072}) {
    for (const auto& [n, k] : kSizes) {
      for (const char* direction : {"forward", "unpacked", "data"}) row(direction, {m, n, k});
    }
  }
  for (const int64_t tokens : {384, 3072}) {
    for (const auto& [n, k] : kSizes) row("weights", {k, n, tokens});
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "-") == 0) return serve();
  DType dtype = DType::kFloat32;
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  if (argc > 3 || threads < 1 || (argc == 3 && !parse_dtype(argv[2], &dtype))) {
    std::fprintf(stderr, "usage: gemm [THREADS [float32|bfloat16|float16]] | gemm -\n");
    return 1;
  }
  return table(threads, dtype);
}
