// cuda_sm80's products, epilogues and norms where they run: streams, refusals, tiles, banks of shared memory. What they compute
// the tests of the CPU's kernels say (linear_on_host.cc).
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/call.h"
#include "cuda/linear_call.h"
#include "cuda/linear_kernels.h"
#include "cuda/linear_launch.h"
#include "sim/cudart.h"

namespace polyhead::linear {
namespace {

const Kernel& kernel() { return kCudaSm80; }
const Run kDefaultStream(nullptr, 1);

// Memory of the device until the process ends.
void* device_memory(size_t bytes, bool written) {
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, bytes), cudaSuccess);
  if (written) {
    std::mt19937 random(static_cast<unsigned>(bytes));
    std::vector<uint16_t> halves(bytes /
                                 2);  // float16 from 1 to 2 of either sign; floats and bfloat16 of moderate size
    for (uint16_t& x : halves) x = static_cast<uint16_t>((random() & 0x8000) | (0x3e00 + random() % 0x200));
    EXPECT_EQ(cudaMemcpy(memory, halves.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
  }
  return memory;
}

Matrix on_device(DType dtype, int64_t rows, int64_t columns, bool written) {
  const auto bytes = static_cast<size_t>(rows * columns) * dtype_size_bytes(dtype);
  return matrix(device_memory(bytes, written), dtype, rows, columns);
}

// The same numbers, column by column.
Matrix column_by_column(const Matrix& x) {
  const Matrix to = on_device(x.dtype, x.columns.size(), x.rows.size(), false).transposed();
  PointwiseArgs args;
  args.x = x, args.y = to;
  EXPECT_TRUE(kernel().pointwise(args, kDefaultStream).ok());
  return to;
}

void wait() { ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault(); }

struct Product {
  GemmDesc desc;
  GemmArgs args;

  Product(DType dtype, int64_t m, int64_t n, int64_t k) : desc{m, n, k, dtype} {
    args.a = on_device(dtype, m, k, true);
    args.b = on_device(dtype, k, n, true);
    args.c = on_device(DType::kFloat32, m, n, false);
  }
  Status run(const Run& run = kDefaultStream) {
    args.workspace = device_memory(kernel().gemm_workspace_bytes(desc, 1).value() + 64, false);
    return kernel().gemm(desc, args, run);
  }
  std::string bits() const {
    return {static_cast<const char*>(args.c.data), static_cast<size_t>(desc.m * desc.n) * sizeof(float)};
  }
};

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// A tile of twice as many rows and columns, as products have that fill a GPU: whatever lies side by side.
TEST(CudaLinear, LargeTilesGiveTheSameBits) {
  for (const DType dtype : kTypes) {
    Product product(dtype, 131, 136, 67);
    ASSERT_TRUE(product.run().ok());
    wait();
    const std::string want = product.bits();
    const Matrix a = product.args.a, b = product.args.b, a_by_column = column_by_column(a),
                 b_by_column = column_by_column(b);
    for (const bool a_inside : {true, false}) {
      for (const bool b_inside : {true, false}) {
        cuda::GemmProblem p;
        p.number = cuda::number_of(dtype);
        p.a = cuda::factor_of(a_inside ? a : a_by_column);
        p.b = cuda::factor_of((b_inside ? b_by_column : b).transposed());
        EXPECT_EQ(p.a.terms_inside, a_inside);
        EXPECT_EQ(p.b.terms_inside, b_inside);
        p.m = 131, p.n = 136, p.k = 67;
        const cuda::GemmTile tile = cuda::gemm_tile(p.number, cuda::GemmSize::kLarge);
        p.row_tiles = static_cast<unsigned>(pieces(p.m, tile.rows));
        p.column_tiles = static_cast<unsigned>(pieces(p.n, tile.columns));
        Matrix& c = product.args.c;
        c = on_device(DType::kFloat32, p.m, p.n, false);
        p.finish = cuda::finish_of({}, c.rows, c, false);
        const cudaError_t error =
            dtype == DType::kFloat32    ? launch_gemm<cuda::Float32>(p, cuda::GemmSize::kLarge, nullptr)
            : dtype == DType::kBFloat16 ? launch_gemm<cuda::BFloat16>(p, cuda::GemmSize::kLarge, nullptr)
                                        : launch_gemm<cuda::Float16>(p, cuda::GemmSize::kLarge, nullptr);
        ASSERT_EQ(error, cudaSuccess);
        wait();
        EXPECT_TRUE(product.bits() == want) << dtype_name(dtype) << a_inside << b_inside;
      }
    }
  }
}

// Products of few rows have the bits of many, whatever lies side by side, in all of a tile's columns and in parts of one.
TEST(CudaLinear, FewRowsHaveTheBitsOfMany) {
  for (const DType dtype : kTypes) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>(136, 67), {32, 1024}, {5, 530}, {200, 16}}) {
      Product many(dtype, 40, n, k);
      const Matrix a = many.args.a, b = many.args.b;
      ASSERT_TRUE(many.run().ok());
      const Matrix a_by_column = column_by_column(a), b_by_column = column_by_column(b);
      wait();
      const std::string all = many.bits();
      const size_t row_bytes = static_cast<size_t>(n) * sizeof(float);
      for (const int64_t m : {1, 3, 4, 5, 16}) {
        for (const int way : {0, 1, 2, 3}) {
          Product few(dtype, m, n, k);
          few.args.a = way % 2 == 0 ? a : a_by_column;
          few.args.b = way / 2 == 0 ? b : b_by_column;
          ASSERT_EQ(few.args.a.rows.sizes[2], 40);
          few.args.a.rows.sizes[2] = m;
          ASSERT_TRUE(few.run().ok());
          wait();
          EXPECT_TRUE(few.bits() == all.substr(0, static_cast<size_t>(m) * row_bytes))
              << dtype_name(dtype) << " " << m << " " << n << " " << k << " " << way;
        }
      }
    }
  }
}

// 217 tiles of 128 x 128: of rows that lie in the last bands, too.
TEST(CudaLinear, ManyTilesAreAllComputed) {
  Product many(DType::kBFloat16, 31 * 128 - 3, 7 * 128 - 8, 8);
  ASSERT_TRUE(many.run().ok());
  wait();
  const std::string all = many.bits();
  const size_t row_bytes = static_cast<size_t>(many.desc.n) * sizeof(float);
  for (const int64_t row : {int64_t{0}, int64_t{1029}, many.desc.m - 1}) {
    Product one(DType::kBFloat16, 1, many.desc.n, 8);
    one.args.a = many.args.a;
    one.args.a.data = static_cast<uint16_t*>(many.args.a.data) + row * 8;
    one.args.a.rows = axis(1, 0);
    one.args.b = many.args.b;
    ASSERT_TRUE(one.run().ok());
    wait();
    EXPECT_TRUE(one.bits() == all.substr(static_cast<size_t>(row) * row_bytes, row_bytes)) << row;
  }
}

// No two lanes of a phase want the same bank of shared memory: in what twice as many terms cost more.
TEST(CudaLinear, HasNoBankConflictsInItsMainLoop) {
  constexpr std::pair<int64_t, bool> kRows[] = {{64, true}, {64, false}, {16, true}, {1, true}};
  for (const DType dtype : kTypes) {
    for (const auto& [rows, a_inside] : kRows) {
      for (const bool b_inside : {true, false}) {
        uint64_t phases = 0, conflicts = 0;
        for (const int64_t k : {192, 384}) {
          Product product(dtype, rows, 64, k);
          if (!a_inside) product.args.a = column_by_column(product.args.a);
          if (b_inside) product.args.b = column_by_column(product.args.b);
          wait();
          cuda_sim::take_counters();
          ASSERT_TRUE(product.run().ok());
          wait();
          const cuda_sim::Counters counters = cuda_sim::take_counters();
          EXPECT_GT(counters.bank_phases, phases);
          if (k == 384) {
            EXPECT_EQ(counters.bank_waves - counters.bank_phases, conflicts) << dtype_name(dtype);
          }
          phases = counters.bank_phases, conflicts = counters.bank_waves - counters.bank_phases;
        }
      }
    }
  }
}

TEST(CudaLinear, RunsOnTheStreamOfTheCall) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  const polyhead::Run run(nullptr, 1, stream);
  Product product(DType::kFloat32, 5, 7, 2000);
  product.desc.split_k = true;
  ASSERT_GT(kernel().gemm_workspace_bytes(product.desc, 1), MemorySize());
  const Matrix y = on_device(DType::kFloat32, 5, 7, false), sums = on_device(DType::kFloat32, 1, 7, false);
  NormForwardArgs norm;
  norm.x = norm.y = y;
  norm.rstd = device_memory(5 * sizeof(float), false);
  ASSERT_TRUE(product.run(run).ok());
  PointwiseArgs pointwise;
  pointwise.x = product.args.c, pointwise.y = y, pointwise.sums = sums;
  pointwise.workspace = device_memory(kernel().sums_workspace_bytes(5, 7, DType::kFloat32).value(), false);
  ASSERT_TRUE(kernel().pointwise(pointwise, run).ok());
  ASSERT_TRUE(kernel().norm_forward(norm, run).ok());
  EXPECT_FALSE(cuda_sim::is_written(product.args.c.data, 5 * 7 * sizeof(float)));
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess) << cuda_sim::take_fault();
  EXPECT_TRUE(cuda_sim::is_written(product.args.c.data, 5 * 7 * sizeof(float)));
  EXPECT_TRUE(cuda_sim::is_written(sums.data, 7 * sizeof(float)));
  EXPECT_TRUE(cuda_sim::is_written(norm.rstd, 5 * sizeof(float)));
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// Sizes alone say how terms are cut: never the number of threads, and few where tiles are many.
TEST(CudaLinear, CutsTermsBySizes) {
  const auto slices = [](GemmDesc desc, int num_threads = 1) {
    const MemorySize bytes = kernel().gemm_workspace_bytes(desc, num_threads);
    return static_cast<int64_t>(bytes.value()) / (desc.m * desc.n * 4);
  };
  GemmDesc desc{128, 128, 1 << 20, DType::kBFloat16};
  EXPECT_EQ(slices(desc), 0);  // not asked for
  desc.split_k = true;
  EXPECT_EQ(slices(desc), 512);
  EXPECT_EQ(slices(desc, 64), 512);
  desc.m = desc.n = 2048;
  EXPECT_EQ(slices(desc), 2);
  desc.k = 1000;
  EXPECT_EQ(slices(desc), 0);
  desc.m = desc.n = 4096, desc.k = 1 << 20;
  EXPECT_EQ(slices(desc), 0);
}

TEST(CudaLinear, RefusesBySentence) {
  EXPECT_EQ(kernel().why_not(DType::kFloat64), "dtype is float64, takes float32, bfloat16 or float16");
  EXPECT_EQ(kernel().why_not(DType::kFloat16), "");
  cuda_sim::set_driver_version(0);
  cuda_sim::set_devices({});
  EXPECT_EQ(kernel().why_not(DType::kFloat16), "no NVIDIA driver is installed here");
  cuda_sim::set_devices({{}});
  cuda_sim::set_driver_version(CUDART_VERSION);

  const int64_t huge = (int64_t{1} << 30) + 1;
  char some[64] = {};
  const auto refusal = [&](const Status& status) {
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    return status.message();
  };
  GemmArgs args;
  args.a = args.b = args.c = matrix(some, DType::kFloat32, 1, 1);
  EXPECT_EQ(refusal(kernel().gemm({huge, 1, 1}, args, kDefaultStream)),
            "the number of rows is 1073741825, cuda_sm80 takes 0 to 2^30");
  EXPECT_EQ(refusal(kernel().gemm({1, 1, huge}, args, kDefaultStream)),
            "the number of terms is 1073741825, cuda_sm80 takes 0 to 2^30");
  EXPECT_EQ(refusal(kernel().gemm({huge - 1, huge - 1, 1}, args, kDefaultStream)),
            "the matrix needs more than 2^31 - 1 blocks of threads, which a grid cannot hold");
  PointwiseArgs wide;
  wide.x = matrix(some, DType::kFloat32, 1, huge);
  EXPECT_EQ(refusal(kernel().pointwise(wide, kDefaultStream)),
            "the number of columns is 1073741825, cuda_sm80 takes 0 to 2^30");
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // nothing was launched
}

TEST(CudaLinear, ChecksWhereMemoryLies) {
  char here[64] = {};
  void* const there = device_memory(64, false);
  const NamedMemory both[2] = {{"weights", there}, {"x", here}};
  EXPECT_TRUE(kernel().check_place({both, 1}, kDefaultStream).ok());
  EXPECT_EQ(kernel().check_place({both, 2}, kDefaultStream).message(),
            "x lies in the host's memory, must lie on CUDA device 0");
  int no_stream = 0;
  const Status status = kernel().check_place({both, 1}, polyhead::Run(nullptr, 1, &no_stream));
  EXPECT_EQ(status.message().rfind("stream is not a stream of CUDA here: ", 0), 0u) << status.message();
}

}  // namespace
}  // namespace polyhead::linear
