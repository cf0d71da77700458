// Calls of attention with a program, forward and backward, computed by a kernel, by the definition in float64, and by the
// naive formula in float32 whose errors kernels are measured by.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "polyhead/attention.h"
#include "programs.h"
#include "testing/call.h"

namespace polyhead::testing {

struct Shape {
  Sizes4 sizes;
  int64_t heads_kv, dim;
  DType dtype = DType::kFloat32;
  bool with_options = false;  // softcap, ALiBi, a mask, a bias and a window besides
};

// One problem: inputs, outputs, gradients, in their dtypes.
struct ProgramCall {
  AttentionDesc desc;
  Inputs in;
  Arrays captures;
  Array grad_out;
  Array out, logsumexp;  // what backward is given; not given: what forward wrote
};

struct ProgramResults {
  Array out, logsumexp, grad_query, grad_key, grad_value, grad_bias, grad_slopes;
  Arrays grad_captures;

  std::vector<const Array*> all() const;
  static std::string name(size_t n);  // of all()[n]
};

// With random numbers. A text that cannot be read fails the test.
ProgramCall make_call(const NamedProgram& program, const Shape& shape, uint64_t seed);

// The same problem in float64, but for what must be float32.
ProgramCall in_double(const ProgramCall& call);

// Backward is given the same out and logsumexp, rounded as they are stored, whoever computes.
void give_exact_out(ProgramCall& call);

ProgramResults by_kernel(const ProgramCall& call, const char* kernel, Executor& executor);

// The contract's yardstick of error: its formula, naively, in float32.
ProgramResults in_float(const ProgramCall& call);

// Of each of ProgramResults::all() the largest sum of the absolute values of the terms that an element is made of, which may
// cancel (testing/definition.h); 0 of out. `call` has its out and logsumexp.
std::vector<double> largest_terms(const ProgramCall& call);

bool is_float_dtype(DType dtype);
double epsilon(DType dtype);

// Of all elements the largest difference; infinite where one is NaN or infinite and the other is not.
double largest_difference(const Array& a, const Array& b, double* magnitude = nullptr);

}  // namespace polyhead::testing
