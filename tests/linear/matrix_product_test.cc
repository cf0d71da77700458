// C = norm(activation(A B + bias) + residual), against plain loops: views of every kind on every kernel, and what bad arguments are told.
#include "polyhead/matrix_product.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "activated.h"
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

using Memory = std::unique_ptr<void, FreeMemory>;

Memory prepacked(const MatrixProduct& product, const Tensor& b) {
  Memory memory(std::aligned_alloc(64, (product.prepacked_bytes() + 63) / 64 * 64));
  EXPECT_EQ(product.prepack(b, memory.get(), product.prepacked_bytes()).message(), "");
  return memory;
}

struct Finish {
  ActivationKind activation;
  bool residual;
  NormKind norm;
  bool sum, prepacked;
};

constexpr Finish kFinishes[] = {{ActivationKind::kRelu, false, NormKind::kNone, false, false},
                                {ActivationKind::kGelu, true, NormKind::kNone, false, true},
                                {ActivationKind::kGeluTanh, false, NormKind::kRmsNorm, true, true},
                                {ActivationKind::kSilu, true, NormKind::kLayerNorm, false, false},
                                {ActivationKind::kNone, true, NormKind::kLayerNorm, true, true}};

// The sums and their norm, row by row, in float64.
struct Finished {
  std::vector<double> sum, normed;
};

Finished finished(const MatrixProductDesc& d, const MatrixProductArgs& args, const Tensor& b,
                  const std::vector<float>& bias, const std::vector<float>& residual, const std::vector<float>& gamma) {
  Finished all;
  for (int64_t i = 0; i < d.m; ++i) {
    for (int64_t j = 0; j < d.n; ++j) {
      double x = static_cast<double>(bias[static_cast<size_t>(j)]);
      for (int64_t k = 0; k < d.k; ++k) x += at(args.a, i, k) * at(b, k, j);
      x = testing::activated(d.activation, x);
      if (d.residual) x += static_cast<double>(residual[static_cast<size_t>(i * d.n + j)]);
      all.sum.push_back(x);
    }
    const double* row = &all.sum[static_cast<size_t>(i * d.n)];
    double mean = 0, square = 0;
    for (int64_t j = 0; d.norm == NormKind::kLayerNorm && j < d.n; ++j) mean += row[j] / static_cast<double>(d.n);
    for (int64_t j = 0; j < d.n; ++j) square += (row[j] - mean) * (row[j] - mean) / static_cast<double>(d.n);
    for (int64_t j = 0; j < d.n; ++j) {
      all.normed.push_back((row[j] - mean) / std::sqrt(square + d.norm_eps) *
                           static_cast<double>(gamma[static_cast<size_t>(j)]));
    }
  }
  return all;
}

TEST(MatrixProduct, FinishesItsResult) {
  for (const std::string& kernel : kernels()) {
    for (const Finish& f : kFinishes) {
      MatrixProductDesc desc;
      desc.m = 29, desc.n = 70, desc.k = 800, desc.bias = true;  // more than a chunk of k
      desc.activation = f.activation, desc.residual = f.residual, desc.norm = f.norm, desc.prepacked = f.prepacked;
      PlanOptions options;
      options.kernel = kernel;
      const auto product = matrix_product(desc, options);
      if (testing::refused(product.status())) continue;
      ASSERT_TRUE(product.ok()) << product.status().message();
      const std::vector<float> a = random_floats(1, desc.m * desc.k), b = random_floats(2, desc.k * desc.n);
      const std::vector<float> bias = random_floats(3, desc.n), residual = random_floats(4, desc.m * desc.n);
      const std::vector<float> gamma = random_floats(5, desc.n);
      std::vector<float> out(residual.size(), NAN), sum = out;
      MatrixProductArgs args;
      args.a = view(a, desc.m, desc.k, false);
      const Tensor matrix = view(b, desc.k, desc.n, true);
      const Memory packed = f.prepacked ? prepacked(*product, matrix) : nullptr;
      if (f.prepacked) {
        args.prepacked = packed.get(), args.prepacked_bytes = product->prepacked_bytes();
      } else {
        args.b = matrix;
      }
      args.bias = Tensor(bias.data(), DType::kFloat32, {desc.n});
      if (f.residual) args.residual = Tensor(residual.data(), DType::kFloat32, {desc.m, desc.n});
      if (f.norm != NormKind::kNone) args.gamma = Tensor(gamma.data(), DType::kFloat32, {desc.n});
      args.c = Tensor(out.data(), DType::kFloat32, {desc.m, desc.n});
      if (f.sum) args.sum = Tensor(sum.data(), DType::kFloat32, {desc.m, desc.n});
      ASSERT_EQ(run(*product, args).message(), "");
      const Finished exact = finished(desc, args, matrix, bias, residual, gamma);
      const bool normed = f.norm != NormKind::kNone;
      // Sums of 800 terms of size 1: some 28 each, to 800^0.5 roundings; a norm divides by that again.
      for (size_t i = 0; i < out.size(); ++i) {
        const double bound = normed ? 2e-5 : 1.5e-4;
        ASSERT_NEAR(static_cast<double>(out[i]), normed ? exact.normed[i] : exact.sum[i], bound) << kernel << " " << i;
        if (!f.sum) continue;
        ASSERT_NEAR(static_cast<double>(sum[i]), exact.sum[i], 1.5e-4) << kernel << " " << i;
      }
    }
  }
}

TEST(MatrixProduct, PrepackedOnceForAnyNumberOfRows) {
  MatrixProductDesc desc;
  desc.m = 37, desc.n = 50, desc.k = 1500, desc.prepacked = true;
  const auto all = matrix_product(desc);
  desc.m = 1;
  const auto one = matrix_product(desc);
  ASSERT_TRUE(all.ok() && one.ok());
  const std::vector<float> a = random_floats(1, 37 * desc.k), b = random_floats(2, desc.k * desc.n);
  std::vector<float> out(37 * 50, NAN), row(50, NAN);
  const Memory packed = prepacked(*one, view(b, desc.k, desc.n, false));
  MatrixProductArgs args;
  args.prepacked = packed.get(), args.prepacked_bytes = one->prepacked_bytes();
  args.a = view(a, 37, desc.k, false);
  args.c = Tensor(out.data(), DType::kFloat32, {37, desc.n});
  ASSERT_EQ(run(*all, args).message(), "");
  args.a = Tensor(a.data() + 20 * desc.k, DType::kFloat32, {1, desc.k});
  args.c = Tensor(row.data(), DType::kFloat32, {1, desc.n});
  ASSERT_EQ(run(*one, args).message(), "");
  EXPECT_EQ(row, std::vector<float>(out.begin() + 20 * 50, out.begin() + 21 * 50));
  desc.n = 49;
  const auto other = matrix_product(desc);
  ASSERT_TRUE(other.ok());
  args.c = Tensor(row.data(), DType::kFloat32, {1, desc.n});
  EXPECT_EQ(run(*other, args).message(), "prepacked was prepacked for other sizes, another dtype or another kernel");
  args.prepacked = nullptr;
  EXPECT_EQ(run(*other, args).message().substr(0, 17), "prepacked is null");
}

TEST(MatrixProduct, SaysWhatIsWrong) {
  MatrixProductDesc desc;
  desc.m = -1;
  EXPECT_EQ(matrix_product(desc).status().message(), "m is -1, must not be negative");
  desc.m = INT64_C(1) << 40, desc.k = INT64_C(1) << 40;
  EXPECT_FALSE(matrix_product(desc).ok());
  desc.m = 4, desc.n = 3, desc.k = 2;
  desc.activation = static_cast<ActivationKind>(5);
  EXPECT_EQ(matrix_product(desc).status().message(), "activation is 5, must be an ActivationKind: 0 to 4");
  desc.activation = ActivationKind::kNone, desc.norm = NormKind::kLayerNorm, desc.norm_eps = 0;
  EXPECT_EQ(matrix_product(desc).status().message(), "norm_eps is 0, must be positive and finite");
  desc.norm = NormKind::kNone;
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
