// What the simulated runtime says besides: faults of kernels that nvcc compiled, of launches, and of programs that do
// not wait; what is counted.
#include <gtest/gtest.h>

#include <vector>

#include "sim/cudart.h"
#include "small_kernels.h"

namespace {

using small_kernels::Fault;
using small_kernels::SumFault;

class CudaRuntime : public ::testing::Test {
 protected:
  static float* memory(size_t count, bool written = true) {
    void* at = nullptr;
    EXPECT_EQ(cudaMalloc(&at, 4 * count), cudaSuccess);
    if (written) {
      EXPECT_EQ(cudaMemsetAsync(at, 0, 4 * count, nullptr), cudaSuccess);
    }
    return static_cast<float*>(at);
  }

  // Of a 45 x 72 x 88 product with the fault: its sentence, or "wrong" or "right".
  static std::string outcome(Fault fault) {
    constexpr int m = 45, n = 72, k = 88;
    constexpr size_t kSizes[] = {2 * m * k, 2 * k * n, 4 * m * n};
    std::vector<uint16_t> ones(m * k + k * n), steps(m * k);
    for (size_t i = 0; i < steps.size(); ++i)
      steps[i] = static_cast<uint16_t>(0x3f80 + i / k % 4 * 32);  // 1, 1.25, 1.5, 1.75 by rows
    std::fill(ones.begin(), ones.end(), 0x3f80);
    void* there[3];
    for (int i = 0; i < 3; ++i) EXPECT_EQ(cudaMalloc(&there[i], kSizes[i]), cudaSuccess);
    cudaMemcpy(there[0], steps.data(), kSizes[0], cudaMemcpyHostToDevice);
    cudaMemcpy(there[1], ones.data(), kSizes[1], cudaMemcpyHostToDevice);
    cudaMemsetAsync(there[2], 0, kSizes[2], nullptr);
    auto* c = static_cast<float*>(there[2]);
    small_kernels::product(static_cast<uint16_t*>(there[0]), static_cast<uint16_t*>(there[1]), c, m, n, k, fault,
                           nullptr);
    const cudaError_t error = cudaDeviceSynchronize();
    std::string said = cuda_sim::take_fault();
    EXPECT_EQ(error == cudaErrorLaunchFailure, !said.empty()) << said;
    EXPECT_EQ(cudaGetLastError(), error);
    for (int i = 0; i < m * n && said.empty(); ++i) {
      if (c[i] != 88 * (1 + static_cast<float>(i / n % 4) / 4)) said = "wrong";
    }
    for (void* at : there) EXPECT_EQ(cudaFree(at), cudaSuccess);
    return said.empty() ? "right" : said;
  }

  // Of the sums of x[i][j] = i + j.
  static std::string outcome(SumFault fault) {
    constexpr int n = 64;
    float *x = memory(n * n), *sums = memory(n + 2, false);
    std::vector<float> numbers(n * n);
    for (int i = 0; i < n * n; ++i) numbers[static_cast<size_t>(i)] = static_cast<float>(i / n + i % n);
    cudaMemcpy(x, numbers.data(), 4 * numbers.size(), cudaMemcpyHostToDevice);
    small_kernels::causal_sums(x, sums, fault, nullptr);
    const cudaError_t error = cudaDeviceSynchronize();
    std::string said = cuda_sim::take_fault();
    EXPECT_EQ(error == cudaErrorLaunchFailure, !said.empty()) << said;
    EXPECT_EQ(cudaGetLastError(), error);
    const auto row = [](int i) { return i * (i + 1) + i * (i + 1) / 2; };
    int want[n + 2] = {};
    for (int i = 0; i < n; ++i) want[i] = row(i) + row(i ^ 1), want[n + i / 32] += want[i];
    for (int i = 0; i < n + 2 && said.empty(); ++i) {
      if (sums[i] != static_cast<float>(want[i])) said = "wrong";
    }
    for (float* at : {x, sums}) EXPECT_EQ(cudaFree(at), cudaSuccess);
    return said.empty() ? "right" : said;
  }

  template <class Faults>
  static void expect_outcomes(const Faults& faults) {
    for (const auto& [fault, begin] : faults) {
      const std::string said = outcome(fault);
      EXPECT_EQ(said.substr(0, std::string(begin).size()), begin) << static_cast<int>(fault) << ": " << said;
      EXPECT_TRUE(said.size() <= 5 || said.find(".cu") != std::string::npos) << said;
    }
  }
};

TEST_F(CudaRuntime, FindsTheFaultsThatKernelsAreCompiledWith) {
  const std::pair<Fault, const char*> kFaults[] = {
      {Fault::kNone, "right"},
      {Fault::kSwappedOperands, "wrong"},
      {Fault::kFragmentRow, "wrong"},
      {Fault::kMissingBarrier, "race: "},
      {Fault::kNoBarrierBeforeReuse, "race: "},
      {Fault::kWaitOffByOne, "race: touched while a cp.async to it is in flight, issued by warp"},
      {Fault::kMissingCommit, "race: touched while a cp.async to it is in flight, issued by warp"},
      {Fault::kWrongStage, "race: touched while a cp.async to it is in flight, issued by warp"},
      {Fault::kCopyPastTheTail, "out of bounds: global address"},
      {Fault::kUnguardedTail, "out of bounds: global address"},
      {Fault::kUninitialised, "register read before it was written"},
      {Fault::kHalfWarpBarrier, "barrier never opens"},
      {Fault::kEarlyReturn, "barrier never opens"},
      {Fault::kCrossBlockSums, "race between blocks: "}};
  expect_outcomes(kFaults);
  const std::pair<SumFault, const char*> kSumFaults[] = {
      {SumFault::kNone, "right"},
      {SumFault::kWrongSwizzle, "wrong"},
      {SumFault::kNoSwizzle, "right"},
      {SumFault::kMaskOffByOne, "wrong"},
      {SumFault::kShuffleLane, "wrong"},
      {SumFault::kStaleSharedMemory, "shared memory read before it was written"},
      {SumFault::kMissingSyncwarp, "race: read, and written by warp 0, lane"},
      {SumFault::kWarpSkipsBarrier, "race: read, and written by warp 0, lane"},
      {SumFault::kDivergentShuffle, "divergence: lanes wait for others that never come"}};
  expect_outcomes(kSumFaults);
}

// Without a swizzle eight lanes of a phase want the same banks.
TEST_F(CudaRuntime, CountsTheWavesOfATileWithoutASwizzle) {
  const auto waves = [](SumFault fault) {
    cuda_sim::take_counters();
    EXPECT_EQ(outcome(fault), "right");
    const cuda_sim::Counters counters = cuda_sim::take_counters();
    return static_cast<double>(counters.bank_waves) / static_cast<double>(counters.bank_phases);
  };
  EXPECT_EQ(waves(SumFault::kNone), 1);
  EXPECT_GT(waves(SumFault::kNoSwizzle), 3);
}

TEST_F(CudaRuntime, RunsNothingBeforeSomebodyWaits) {
  float *x = memory(100), *y = memory(100, false);
  cudaStream_t stream = nullptr, other = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamCreate(&other), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(y, 0, 400, stream), cudaSuccess);
  small_kernels::saxpy(1, x, y, 100, other);  // does not wait for the other stream
  EXPECT_EQ(cudaStreamSynchronize(other), cudaErrorLaunchFailure);
  EXPECT_NE(cuda_sim::take_fault().find("global memory read before it was written"), std::string::npos);
  EXPECT_FALSE(cuda_sim::is_written(y, 400));
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_TRUE(cuda_sim::is_written(y, 400));
  small_kernels::saxpy(1, x, y, 100, stream);
  float first = -1;
  EXPECT_EQ(cudaMemcpy(&first, y, 4, cudaMemcpyDeviceToHost), cudaSuccess);  // the null stream waits for all
  EXPECT_EQ(first, 0);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
  EXPECT_EQ(cudaFree(x), cudaSuccess);
  EXPECT_EQ(cudaFree(y), cudaSuccess);
  cudaGetLastError();
}

TEST_F(CudaRuntime, RefusesWhatTheRealOneRefuses) {
  float *x = memory(100), *y = memory(100, false), host[100] = {};
  EXPECT_EQ(cudaFree(x + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host, host, 400, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(x, host, 401, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(host, 0, 400, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host, y, 400, cudaMemcpyDeviceToHost), cudaErrorLaunchFailure);
  EXPECT_EQ(cuda_sim::take_fault(), "global memory is copied before it was written");
  small_kernels::saxpy(1, x, y, 0, nullptr);  // no block
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaFree(x), cudaSuccess);
  EXPECT_EQ(cudaFree(y), cudaSuccess);
}

// What is compiled for 9.0a runs there alone; the rest, of 8.0, there too.
TEST_F(CudaRuntime, RunsOnDevicesThatCodeIsFor) {
  float *x = memory(100), *y = memory(100);
  const auto group_products = [&] {
    const auto* none = reinterpret_cast<const uint16_t*>(x);
    return small_kernels::group_products(none, none, none, y, 0, 0, nullptr);
  };
  for (const auto& [major, minor] : {std::pair(8, 0), std::pair(8, 9), std::pair(10, 0), std::pair(12, 0)}) {
    cuda_sim::set_devices({{"another", major, minor}});
    EXPECT_EQ(group_products(), cudaErrorNoKernelImageForDevice) << major << "." << minor;
    cudaGetLastError();
    small_kernels::saxpy(1, x, y, 100, nullptr);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  cuda_sim::set_devices({{"older", 7, 5}});
  small_kernels::saxpy(1, x, y, 100, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNoKernelImageForDevice);
  cuda_sim::set_devices({{"its own", 9, 0}});
  EXPECT_EQ(group_products(), cudaErrorInvalidConfiguration);  // no block: it is there
  cudaGetLastError();
  cuda_sim::set_devices({{}});
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
  EXPECT_EQ(cudaFree(x), cudaSuccess);
  EXPECT_EQ(cudaFree(y), cudaSuccess);
}

TEST_F(CudaRuntime, TakesMemoryThatIsLent) {
  alignas(16) float x[100], y[100];
  for (int n = 0; n < 100; ++n) x[n] = 1, y[n] = 2;
  cuda_sim::lend(x, sizeof x, true);
  cuda_sim::lend(y, sizeof y, true);
  cuda_sim::take_counters();
  small_kernels::saxpy(3, x, y, 100, nullptr);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
  EXPECT_EQ(y[99], 5);
  const cuda_sim::Counters counters = cuda_sim::take_counters();
  EXPECT_EQ(counters.by_opcode.at("fma.rn.f32"), 4u);
  EXPECT_EQ(counters.ideal_sectors, 3u * 13);
  cuda_sim::take_back(x);
  cuda_sim::take_back(y);
}

}  // namespace
