// What the tests of the two blocks share: forward against plain loops, gradients against slopes of the forward, both in
// float64; the other dtypes and kernels against float64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "device_under_test.h"
#include "kernels_to_test.h"
#include "layer_harness.h"
#include "left_out.h"
#include "polyhead/block.h"
#include "testing/guard.h"

namespace polyhead::testing {

using Arrays = std::map<std::string, Array>;

inline Array to_dtype(const Array& from, DType dtype) {
  if (!from.given()) return from;
  Array to(dtype, from.dims);
  for (int64_t n = 0; n < from.size(); ++n) to.set(n, from.at(n));
  return to;
}

inline Array random_array(Random& random, DType dtype, std::vector<int64_t> dims, double mean, double scale) {
  Array array(dtype, std::move(dims));
  for (int64_t n = 0; n < array.size(); ++n) array.set(n, mean + scale * random.normal());
  return array;
}

// An array all of whose bits are set: NaN until it is written.
inline Array unwritten(const Array& like) {
  Array array = like;
  std::fill(array.bytes.begin(), array.bytes.end(), uint8_t{0xff});
  return array;
}

// x [rows, size], naively.
inline Array normed(const NormDesc& norm, const Array& x, const Array& gamma, const Array& beta) {
  if (norm.kind == NormKind::kNone) return x;
  Array y = x;
  const int64_t size = x.dims.back();
  for (int64_t row = 0; row < x.size() / std::max<int64_t>(size, 1); ++row) {
    double mean = 0, square = 0;
    for (int64_t c = 0; c < size; ++c) mean += x.at(row * size + c) / static_cast<double>(size);
    if (norm.kind == NormKind::kRmsNorm) mean = 0;
    for (int64_t c = 0; c < size; ++c) square += std::pow(x.at(row * size + c) - mean, 2) / static_cast<double>(size);
    for (int64_t c = 0; c < size; ++c) {
      const double unit = (x.at(row * size + c) - mean) / std::sqrt(square + norm.eps);
      y.set(row * size + c, unit * (norm.gamma ? gamma.at(c) : 1) + (norm.beta ? beta.at(c) : 0));
    }
  }
  return y;
}

// Workspace and reserve between guard pages, NaN at first.
struct Memory {
  GuardedBytes bytes;
  explicit Memory(size_t size) : bytes((size + 63) / 64 * 64, Guard::kEnd, 0xff) {}
  void* data() const { return bytes.data(); }
};

inline Tensor view_if(const Array& a) { return a.given() ? view(a) : Tensor(); }

// The arrays and the memory of a block's calls, where the block of that kernel computes.
class LentArrays {
 public:
  explicit LentArrays(const std::string& kernel) : loan_(new_loan(kernel)) {}

  Tensor in(const Array& array) { return lent(array, true); }
  Tensor out(const Array& array) { return lent(array, false); }  // also of one that is not given, as in()
  void* memory(const Memory& memory) { return loan_->lend_scratch(memory.data(), memory.bytes.size()); }
  // Of what was in and out, once all has been computed.
  void finish() { EXPECT_EQ(loan_->finish(), ""); }

 private:
  Tensor lent(const Array& array, bool written) {
    if (!array.given()) return {};
    Tensor t = view(array);
    loan_->lend(t, written);
    return t;
  }

  std::unique_ptr<Loan> loan_;
};

inline void expect_near(const Array& got, const Array& want, double relative, const std::string& name) {
  ASSERT_EQ(got.size(), want.size()) << name;
  double largest = 0;
  for (int64_t n = 0; n < want.size(); ++n) largest = std::max(largest, std::fabs(want.at(n)));
  for (int64_t n = 0; n < want.size(); ++n) {
    ASSERT_NEAR(got.at(n), want.at(n), relative * std::max(largest, 1.0)) << name << " [" << n << "]";
  }
}

// The slope of sum(out * grad_out) along two elements of `input`, against its gradient.
inline void expect_slopes(const std::string& name, Array& input, const Array& gradient,
                          const std::function<double()>& loss) {
  for (const int64_t n : {int64_t{0}, input.size() * 2 / 3}) {
    const double x = input.at(n), step = 1e-5;
    if (!std::isfinite(x)) continue;
    input.set(n, x + step);
    const double above = loss();
    input.set(n, x - step);
    const double slope = (above - loss()) / (2 * step);
    input.set(n, x);
    EXPECT_NEAR(gradient.at(n), slope, 1e-6 * (1 + std::fabs(slope))) << name << " [" << n << "]";
  }
}

inline double inner_product(const Array& a, const Array& b) {
  double sum = 0;
  for (int64_t n = 0; n < a.size(); ++n) sum += a.at(n) * b.at(n);
  return sum;
}

// The other dtypes on every kernel that takes them: against float64 on the same numbers, and the same bits on any threads.
template <class Case, class Numbers>
inline void expect_all_kernels(Case c, DType& dtype, const Numbers& numbers) {
  constexpr std::pair<DType, double> kTypes[] = {
      {DType::kFloat32, 1e-5}, {DType::kBFloat16, 0.06}, {DType::kFloat16, 0.01}};
  for (const auto& [type, relative] : kTypes) {
    const Numbers rounded = numbers_in(numbers, type);
    dtype = DType::kFloat64;
    const Arrays want = run(c, numbers_in(rounded, DType::kFloat64), "", 1, true);
    dtype = type;
    for (const Kernel* kernel : kernels_to_test(device_under_test.device)) {
      SCOPED_TRACE(std::string(dtype_name(type)) + " on " + kernel->name);
      if (refused(block_of(c, kernel->name, 1).status())) continue;
      const Arrays got = run(c, rounded, kernel->name, 1, true), threaded = run(c, rounded, kernel->name, 3, true);
      for (const auto& [name, array] : want) {
        expect_near(got.at(name), array, relative, name);
        EXPECT_EQ(difference(name.c_str(), got.at(name), threaded.at(name)), "");
      }
    }
  }
}

}  // namespace polyhead::testing
