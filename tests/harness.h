// Runs kernels in guarded memory and judges what they wrote by the yardstick of the contract.
#pragma once

#include <string>
#include <vector>

#include "contract/kernel.h"
#include "guard.h"
#include "problem.h"

namespace polyhead::testing {

// What one forward call wrote, densely stored, and what it must not have done.
struct Outputs {
  Array out, logsumexp, weights, column_sums;
  std::vector<std::string> faults;  // elements not written, gaps or inputs written
};

// "" if two arrays, or two calls, have the same bits, else the first difference.
std::string difference(const char* name, const Array& a, const Array& b);
std::string difference(const Outputs& a, const Outputs& b);

struct RunOptions {
  int threads = 1;  // 0: one thread, tasks in reverse order
  Layout layout = Layout::kBshd;
  uint64_t layout_seed = 1;  // which layout each operand gets of Layout::kMixed
  Guard guard = Guard::kEnd;
  bool logsumexp = true;
  bool through_plan = false;  // Plan::forward, which checks the arguments; `kernel` must be in kernel_list()
};

// One call of `kernel` in guarded memory: inputs checked unchanged, outputs and workspace start as NaN.
Outputs run(const Kernel& kernel, const AttentionDesc& desc, const Inputs& in, const RunOptions& options = {});

// The pool of so many threads that all runs share; 0 as above.
Executor& executor(int threads);

// The arguments of a call on the inputs as they are stored; the outputs are the caller's to set.
ForwardArgs dense_args(const Inputs& in);

// Input operands of a call in guarded memory.
class PlacedInputs {
 public:
  explicit PlacedInputs(const RunOptions& options) : options_(options), random_(options.layout_seed) {}

  Layout next_layout();  // of an operand, output or input
  Tensor add(const char* name, const Array& array) { return add(name, array, next_layout()); }
  Tensor add(const char* name, const Array& array, Layout layout);
  ForwardArgs add(const Inputs& in);  // all of them; the outputs are the caller's to set

  // The names of those that were written to are appended to *faults.
  void check_unchanged(std::vector<std::string>* faults) const;

 private:
  const RunOptions& options_;
  Random random_;
  std::vector<const char*> names_;
  std::vector<Placed> placed_;
};

// The reference in arithmetic of T (double or float). wide: results in float64, whatever their dtype should be.
template <class T>
Outputs reference_outputs(const AttentionDesc& desc, const Inputs& in, bool wide);

// What the definition gives.
struct Expected {
  Outputs exact;    // float64 arithmetic and results
  Outputs naive;    // the yardstick: float32 arithmetic (float64 with float64 inputs), results in their own dtypes
  Array magnitude;  // sum_k P_k |V_k|, float64, for each element of `out`
};
Expected expected(const AttentionDesc& desc, const Inputs& in);

}  // namespace polyhead::testing
