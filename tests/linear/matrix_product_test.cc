// C = A B + bias, against plain loops: views of every kind on every kernel, and what bad arguments are told.
#include "polyhead/matrix_product.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "left_out.h"
#include "polyhead/kernels.h"
#include "testing/random.h"

namespace polyhead {
namespace {

struct FreeMemory {
  void operator()(void* memory) const { std::free(memory); }
};

struct Case {
  int64_t m, n, k;
  bool a_transposed, b_transposed, bias, accumulate;
};

constexpr Case kCases[] = {{1, 256, 64, false, true, false, false}, {37, 19, 23, false, false, true, false},
                           {64, 64, 64, true, false, false, true},  {8, 24, 1000, true, false, false, false},
                           {100, 3, 5, true, true, true, true},     {5, 7, 0, false, false, true, false},
                           {0, 4, 4, false, false, false, false}};

std::vector<float> random_floats(uint64_t seed, int64_t count) {
  testing::Random random(1, seed);
  std::vector<float> all(static_cast<size_t>(count));
  for (float& x : all) x = static_cast<float>(random.normal());
  return all;
}

// A [rows, columns] view of memory that has it row after row, or column after column.
Tensor view(const std::vector<float>& memory, int64_t rows, int64_t columns, bool transposed) {
  Tensor t(memory.data(), DType::kFloat32, {rows, columns});
  if (transposed) t.strides[0] = 1, t.strides[1] = rows;
  return t;
}

double at(const Tensor& t, int64_t i, int64_t j) {
  return static_cast<double>(static_cast<const float*>(t.data)[i * t.strides[0] + j * t.strides[1]]);
}

Status run(const MatrixProduct& product, MatrixProductArgs args) {
  const size_t bytes = (product.workspace_bytes() + 127) / 64 * 64;
  const std::unique_ptr<void, FreeMemory> workspace(std::aligned_alloc(64, bytes));
  args.workspace = workspace.get();
  args.workspace_bytes = bytes;
  return product.forward(args);
}

TEST(MatrixProduct, MatchesPlainLoops) {
  for (const std::string& kernel : kernels()) {
    for (const Case& c : kCases) {
      MatrixProductDesc desc;
      desc.m = c.m, desc.n = c.n, desc.k = c.k, desc.bias = c.bias;
      PlanOptions options;
      options.kernel = kernel;
      const auto product = matrix_product(desc, options);
      if (testing::refused(product.status())) continue;
      ASSERT_TRUE(product.ok()) << product.status().message();
      EXPECT_EQ(product->kernel_name(), kernel);
      const std::vector<float> a = random_floats(1, c.m * c.k), b = random_floats(2, c.k * c.n);
      const std::vector<float> bias = random_floats(3, c.n), before = random_floats(4, c.m * c.n);
      std::vector<float> out = before;
      MatrixProductArgs args;
      args.a = view(a, c.m, c.k, c.a_transposed);
      args.b = view(b, c.k, c.n, c.b_transposed);
      if (c.bias) args.bias = Tensor(bias.data(), DType::kFloat32, {c.n});
      args.c = Tensor(out.data(), DType::kFloat32, {c.m, c.n});
      args.accumulate = c.accumulate;
      ASSERT_EQ(run(*product, args).message(), "");
      for (int64_t i = 0; i < c.m; ++i) {
        for (int64_t j = 0; j < c.n; ++j) {
          const auto place = static_cast<size_t>(i * c.n + j);
          double exact = c.accumulate ? static_cast<double>(before[place]) : 0, magnitude = std::abs(exact);
          if (c.bias) exact += static_cast<double>(bias[static_cast<size_t>(j)]), magnitude += 4;
          for (int64_t k = 0; k < c.k; ++k) {
            exact += at(args.a, i, k) * at(args.b, k, j);
            magnitude += std::abs(at(args.a, i, k) * at(args.b, k, j));
          }
          // Float sums of k terms in any order, with room for a few roundings.
          const double bound = (std::sqrt(static_cast<double>(c.k)) + 4) * 1.2e-7 * magnitude;
          ASSERT_NEAR(static_cast<double>(out[place]), exact, bound) << kernel << " " << c.m << " " << i << " " << j;
        }
      }
    }
  }
}

TEST(MatrixProduct, SaysWhatIsWrong) {
  MatrixProductDesc desc;
  desc.m = -1;
  EXPECT_EQ(matrix_product(desc).status().message(), "m is -1, must not be negative");
  desc.m = INT64_C(1) << 40, desc.k = INT64_C(1) << 40;
  EXPECT_FALSE(matrix_product(desc).ok());
  desc.m = 4, desc.n = 3, desc.k = 2;
  const auto product = matrix_product(desc);
  ASSERT_TRUE(product.ok()) << product.status().message();
  const std::vector<float> a(8, 1.0f), b(6, 1.0f);
  std::vector<float> out(12, 7.0f);
  MatrixProductArgs args;
  args.a = Tensor(a.data(), DType::kFloat32, {4, 2});
  args.b = Tensor(b.data(), DType::kFloat32, {3, 2});
  args.c = Tensor(out.data(), DType::kFloat32, {4, 3});
  EXPECT_EQ(run(*product, args).message().substr(0, 2), "b ");
  args.b = Tensor(b.data(), DType::kFloat32, {2, 3});
  args.bias = Tensor(b.data(), DType::kFloat32, {3});
  EXPECT_FALSE(run(*product, args).ok());  // no bias was asked for
  args.bias = {};
  args.c = Tensor(a.data(), DType::kFloat32, {4, 2});
  EXPECT_FALSE(run(*product, args).ok());
  EXPECT_EQ(out, std::vector<float>(12, 7.0f));
  args.c = Tensor(out.data(), DType::kFloat32, {4, 3});
  EXPECT_EQ(run(*product, args).message(), "");
  EXPECT_EQ(out, std::vector<float>(12, 2.0f));
}

}  // namespace
}  // namespace polyhead
