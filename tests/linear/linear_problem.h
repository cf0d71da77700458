// Products and epilogues to test with.
#pragma once

#include <string>
#include <vector>

#include "linear_harness.h"

namespace polyhead::testing {

struct EpilogueOptions {
  bool bias = false, bias_float32 = false;
  linear::Activation activation = linear::Activation::kNone;
  bool gradient = false, pre_activation = false;
  double dropout_p = 0;
  bool residual = false, residual_is_out = false;
  bool accumulate = false;
};

// C[rows, columns] = A[rows, terms] B[terms, columns], or C = epilogue(A[rows, columns]) where `product` is false; each
// axis of one to three dims.
struct LinearProblem {
  std::string name;
  DType dtype = DType::kFloat32, out_dtype = DType::kFloat32;
  bool product = true;
  std::vector<int64_t> rows{1}, columns{1}, terms{1};
  bool packed = false, split_k = false;                                      // of a product
  bool sums = false, out = true, accumulate_sums = false, in_place = false;  // of an epilogue alone
  EpilogueOptions epilogue;
  Layout layout = Layout::kMixed;
  uint64_t seed = 1;

  int64_t m() const { return product_of(rows); }
  int64_t n() const { return product_of(columns); }
  int64_t k() const { return product_of(terms); }
  static int64_t product_of(const std::vector<int64_t>& dims) {
    int64_t size = 1;
    for (int64_t d : dims) size *= d;
    return size;
  }
};

std::string to_string(const LinearProblem& problem);

struct LinearInputs {
  Array a, b, bias, pre_activation, residual, out, sums;  // out, sums: what is added to
};
LinearInputs linear_inputs(const LinearProblem& problem, uint64_t seed);

// One call on a kernel.
CallResult run(const linear::Kernel& kernel, const LinearProblem& problem, const LinearInputs& in,
               const CallOptions& options = {});

// What the definition gives.
ExpectedArrays expected(const LinearProblem& problem, const LinearInputs& in);

// The draws of the problem, with linear_inputs() of each seed; and the verdict on a kernel for them.
Draws draws_of(const LinearProblem& problem);
std::string judge(const linear::Kernel& kernel, const LinearProblem& problem, const CallOptions& options, Draws& draws);

LinearProblem random_linear_problem(uint64_t seed);

// Some rows of the problem alone, in one dim.
LinearInputs rows_of(const LinearProblem& problem, const LinearInputs& in, int64_t first, int64_t last);

}  // namespace polyhead::testing
