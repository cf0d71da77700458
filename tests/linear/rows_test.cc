// Rows without padding, and sums over heads, on every kernel with products: bit for bit what the words of linear.h say.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "core/dtype.h"
#include "linear_harness.h"

namespace polyhead::testing {
namespace {

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
constexpr int64_t kBatch = 2, kBeams = 3, kTime = 5;

class Rows : public ::testing::TestWithParam<const linear::Kernel*> {
 protected:
  const linear::Kernel& kernel_ = *GetParam();
};

// [batch, beam], some beyond the sequence.
template <class Int>
Tensor lengths_of(Int (&numbers)[kBatch * kBeams], DType dtype) {
  return {numbers, dtype, {kBatch, kBeams}};
}

TEST_P(Rows, EndWithTheLongerOfTheirLengths) {
  int32_t first[] = {0, 2, 5, 9, -4, 3};
  int64_t second[] = {1, 1, 1, 1, 1, INT64_MIN};
  for (const DType dtype : kTypes) {
    if (!kernel_.why_not(dtype).empty()) continue;
    for (const int64_t columns : {1, 7, 16}) {
      for (const int threads : {0, 1, 3}) {
        for (const bool both : {false, true}) {
          const Array x = random_array(dtype, {kBatch, kBeams, kTime, columns}, 7);
          const CallOptions options{threads, Layout::kMixed, static_cast<uint64_t>(columns + threads), Guard::kEnd};
          Operands operands(options);
          linear::CopyRowsArgs args;
          args.x = operands.input("x", x, 3);
          const int64_t rows = kBatch * kBeams * kTime;
          args.y = linear::matrix(operands.vector("y", dtype, rows * columns), dtype, rows, columns);
          args.lengths[0] = lengths_of(first, DType::kInt32);
          if (both) args.lengths[1] = lengths_of(second, DType::kInt64);
          ASSERT_TRUE(kernel_.copy_rows(args, executor(threads)).ok());
          const CallResult result = operands.written();
          EXPECT_TRUE(result.faults.empty()) << result.faults.front();
          Array want = x;
          want.dims = {rows * columns};
          const size_t row_bytes = static_cast<size_t>(columns) * dtype_size_bytes(dtype);
          for (int64_t row = 0; row < rows; ++row) {
            const int64_t sequence = row / kTime;
            const int64_t end = both ? std::max<int64_t>(first[sequence], second[sequence]) : first[sequence];
            if (row % kTime >= end) std::memset(want.bytes.data() + static_cast<size_t>(row) * row_bytes, 0, row_bytes);
          }
          EXPECT_EQ(difference("y", result.arrays.at("y"), want), "")
              << dtype_name(dtype) << " " << columns << " " << threads;
        }
      }
    }
  }
}

TEST_P(Rows, OfHeadsAreSummed) {
  constexpr int64_t kHeads = 3;
  for (const DType dtype : kTypes) {
    if (!kernel_.why_not(dtype).empty()) continue;
    for (const int64_t columns : {1, 5, 16}) {
      for (const bool accumulate : {false, true}) {
        const Array x = random_array(dtype, {kBatch, kTime, kHeads, columns}, 3);
        const Array old = random_array(dtype, {kBatch, kTime, columns}, 4);
        const CallOptions options{2, Layout::kMixed, static_cast<uint64_t>(columns), Guard::kEnd};
        Operands operands(options);
        linear::SumHeadsArgs args;
        args.x = operands.input("x", x, 2);
        args.num_heads = kHeads;
        args.y = accumulate ? operands.updated("y", old, 2) : operands.output("y", dtype, old.dims, 2);
        args.accumulate = accumulate;
        ASSERT_TRUE(kernel_.sum_heads(args, executor(2)).ok());
        const CallResult result = operands.written();
        EXPECT_TRUE(result.faults.empty()) << result.faults.front();
        Array want = old;
        for (int64_t row = 0; row < kBatch * kTime; ++row) {
          for (int64_t n = 0; n < columns; ++n) {
            double sum = accumulate ? load_element(old.bytes.data(), dtype, row * columns + n) : 0;
            for (int64_t h = 0; h < kHeads; ++h) {
              sum += load_element(x.bytes.data(), dtype, (row * kHeads + h) * columns + n);
            }
            store_element(want.bytes.data(), dtype, row * columns + n, sum);
          }
        }
        EXPECT_EQ(difference("y", result.arrays.at("y"), want), "")
            << dtype_name(dtype) << " " << columns << " " << accumulate;
      }
    }
  }
}

TEST_P(Rows, WithoutHeadsAreZero) {
  for (const DType dtype : kTypes) {
    if (!kernel_.why_not(dtype).empty()) continue;
    Array y = random_array(dtype, {2, 3}, 1);
    linear::SumHeadsArgs args;
    args.x.dtype = dtype;
    args.x.rows = linear::axis(2, 0), args.x.columns = linear::axis(0, 0);
    args.y = linear::matrix(y.bytes.data(), dtype, 2, 3);
    ASSERT_TRUE(kernel_.sum_heads(args, executor(1)).ok());
    EXPECT_EQ(std::count(y.bytes.begin(), y.bytes.end(), 0), static_cast<int64_t>(y.bytes.size()));
  }
}

TEST_P(Rows, AreClearedByBytes) {
  char bytes[] = "abcdef";
  ASSERT_TRUE(kernel_.clear(bytes + 1, 3, executor(1)).ok());
  EXPECT_EQ(std::string(bytes, 6), std::string("a\0\0\0ef", 6));
  ASSERT_TRUE(kernel_.clear(nullptr, 0, executor(1)).ok());
}

INSTANTIATE_TEST_SUITE_P(Kernels, Rows, ::testing::ValuesIn(linear_kernels_to_test()),
                         [](const auto& each) { return std::string(each.param->name); });

}  // namespace
}  // namespace polyhead::testing
