// Ordinary CUDA programs, whose launches go through <<<>>>: linked once with the simulation, and once with the real
// runtime, where this is skipped unless there is a GPU.
#include <gtest/gtest.h>

#include <vector>

#include "small_kernels.h"
#ifdef POLYHEAD_SIMULATED
#include "sim/cudart.h"
#endif

namespace {

using small_kernels::Fault;

class CudaSmall : public ::testing::Test {
 protected:
  void SetUp() override {
#ifdef POLYHEAD_SIMULATED
    cuda_sim::set_devices({{"simulated", 9, 0}});
#endif
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU: " << cudaGetErrorString(error);
  }

  // Of a number that bfloat16 has.
  static uint16_t bfloat16(int x) {
    const float value = static_cast<float>(x);
    uint32_t bits = 0;
    __builtin_memcpy(&bits, &value, 4);
    return static_cast<uint16_t>(bits >> 16);
  }

  template <class T>
  static T* on_device(const std::vector<T>& values) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, values.size() * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
    return static_cast<T*>(memory);
  }

  template <class T>
  static std::vector<T> on_host(const T* memory, size_t count) {
    std::vector<T> values(count);
    EXPECT_EQ(cudaMemcpy(values.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }
};

TEST_F(CudaSmall, LaunchesInTheOrderOfAStream) {
  std::vector<float> x(300), y(300);
  for (size_t n = 0; n < x.size(); ++n) x[n] = static_cast<float>(n), y[n] = 1;
  float *x_there = on_device(x), *y_there = on_device(y);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  small_kernels::saxpy(2, x_there, y_there, 300, stream);   // y = 2 n + 1
  small_kernels::saxpy(-1, y_there, x_there, 300, stream);  // x = -n - 1
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  x = on_host(x_there, 300);
  y = on_host(y_there, 300);
  for (size_t n = 0; n < x.size(); ++n) {
    EXPECT_EQ(y[n], 2 * static_cast<float>(n) + 1) << n;
    EXPECT_EQ(x[n], -static_cast<float>(n) - 1) << n;
  }
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaFree(x_there), cudaSuccess);
  EXPECT_EQ(cudaFree(y_there), cudaSuccess);
}

// Small whole numbers, whose sums are exact: several blocks, sizes that end within a tile.
TEST_F(CudaSmall, MultipliesOnTensorCores) {
  const int m = 45, n = 72, k = 88;
  const auto a = [](int i, int l) { return (i * 7 + l * 3) % 8; };
  const auto b = [](int l, int j) { return (l * 5 + j * 11) % 16; };
  std::vector<uint16_t> a_bits, b_bits;
  for (int i = 0; i < m * k; ++i) a_bits.push_back(bfloat16(a(i / k, i % k)));
  for (int i = 0; i < k * n; ++i) b_bits.push_back(bfloat16(b(i / n, i % n)));
  uint16_t *a_there = on_device(a_bits), *b_there = on_device(b_bits);
  float* c_there = on_device(std::vector<float>(static_cast<size_t>(m * n), -1.f));
  small_kernels::product(a_there, b_there, c_there, m, n, k, Fault::kNone, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  const std::vector<float> c = on_host(c_there, static_cast<size_t>(m * n));
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      int want = 0;
      for (int l = 0; l < k; ++l) want += a(i, l) * b(l, j);
      ASSERT_EQ(c[static_cast<size_t>(i * n + j)], static_cast<float>(want)) << i << ", " << j;
    }
  }
  for (void* memory : {static_cast<void*>(a_there), static_cast<void*>(b_there), static_cast<void*>(c_there)})
    EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

// Likewise, of zeros and ones.
TEST_F(CudaSmall, MultipliesByWarpgroups) {
  int major = 0, minor = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  ASSERT_EQ(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), cudaSuccess);
  const int m = 128, k = 192, n = 64;
  const auto a = [](int i, int l) { return (i * 7 + l * 3) % 5 == 0 ? 1 : 0; };
  const auto b = [](int l, int j) { return (l * 5 + j * 11) % 3 == 0 ? 1 : 0; };
  const auto e = [](int j, int l) { return (j * 3 + l * 7) % 4 - 1; };
  std::vector<uint16_t> a_bits, b_bits, e_bits;
  for (int i = 0; i < m * k; ++i) a_bits.push_back(bfloat16(a(i / k, i % k)));
  for (int i = 0; i < k * n; ++i) b_bits.push_back(bfloat16(b(i / n, i % n)));
  for (int i = 0; i < n * n; ++i) e_bits.push_back(bfloat16(e(i / n, i % n)));
  uint16_t *a_there = on_device(a_bits), *b_there = on_device(b_bits), *e_there = on_device(e_bits);
  float* c_there = on_device(std::vector<float>(static_cast<size_t>(m * n), -1.f));
  const cudaError_t error = small_kernels::group_products(a_there, b_there, e_there, c_there, m, k, nullptr);
  if (10 * major + minor != 90) {
    EXPECT_EQ(error, cudaErrorNoKernelImageForDevice);
    cudaGetLastError();
    return;
  }
  ASSERT_EQ(error, cudaSuccess);
  const std::vector<float> c = on_host(c_there, static_cast<size_t>(m * n));
  for (int i = 0; i < m; ++i) {
    int product[n] = {};
    for (int j = 0; j < n; ++j) {
      for (int l = 0; l < k; ++l) product[j] += a(i, l) * b(l, j);
    }
    for (int j = 0; j < n; ++j) {
      int want = 0;
      for (int l = 0; l < n; ++l) want += product[l] * e(j, l);
      ASSERT_EQ(c[static_cast<size_t>(i * n + j)], static_cast<float>(want)) << i << ", " << j;
    }
  }
  for (void* memory : {static_cast<void*>(a_there), static_cast<void*>(b_there), static_cast<void*>(e_there),
                       static_cast<void*>(c_there)})
    EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

}  // namespace
