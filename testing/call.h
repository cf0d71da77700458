// Runs kernels in guarded memory, on operands that lie as a problem says.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "contract/kernel.h"
#include "testing/definition.h"
#include "testing/guard.h"
#include "testing/operands.h"

namespace polyhead::testing {

// "" if two arrays have the same bits, or two calls, of which neither has a fault; else the first difference.
std::string difference(const char* name, const Array& a, const Array& b);
std::string difference(const Outputs& a, const Outputs& b);
std::string difference(const Gradients& a, const Gradients& b, GradientSet asked = kAllGradients);

struct RunOptions {
  int threads = 1;  // 0: one thread, tasks in reverse order
  Layout layout = Layout::kBshd;
  uint64_t layout_seed = 1;  // which layout each operand gets of Layout::kMixed, and its gaps
  Guard guard = Guard::kEnd;
  bool logsumexp = true;
  bool through_plan = false;     // Plan::forward, which checks the arguments; `kernel` must be in kernel_list()
  Executor* executor = nullptr;  // null: executor(threads)
};

// As the problem says, which end lies at a guard by its layout_seed, through the plan.
RunOptions run_options(const Problem& problem);

// One call of `kernel` in guarded memory: inputs checked unchanged, outputs and workspace start as NaN.
Outputs run(const Kernel& kernel, const AttentionDesc& desc, const Inputs& in, const RunOptions& options = {});

// Likewise for the gradients `asked`. The plan knows what no kernel need: problems of which some size is 0.
Gradients run(const Kernel& kernel, const AttentionDesc& desc, const BackwardInputs& in, const RunOptions& options = {},
              GradientSet asked = kAllGradients);

// The pool of so many threads that all runs share; 0 as above.
Executor& executor(int threads);

// The arguments of a call on the inputs as they are stored; outputs and captures are the caller's to set.
ForwardArgs dense_args(const Inputs& in);
BackwardArgs dense_args(const BackwardInputs& in);

// Operands of a call in guarded memory.
class PlacedInputs {
 public:
  explicit PlacedInputs(const RunOptions& options)
      : options_(options), random_(options.layout_seed, streams::kLayouts) {}

  Layout next_layout();  // of an operand, output or input
  uint64_t next_gaps() { return random_.bits(); }
  Tensor add(const char* name, const Array& array) { return add(name, array, next_layout()); }
  Tensor add(const char* name, const Array& array, Layout layout);
  // All of them, the captures in memory of this object's, once; the outputs are the caller's to set.
  ForwardArgs add(const AttentionDesc& desc, const Inputs& in);
  BackwardArgs add(const AttentionDesc& desc, const BackwardInputs& in);  // the gradients are the caller's to set

  // The names of those that were written to are appended to *faults.
  void check_unchanged(std::vector<std::string>* faults) const;

 private:
  void add_row(const Inputs& in, ForwardArgs& args);

  const RunOptions options_;
  Random random_;
  std::vector<const char*> names_;
  std::deque<Placed> placed_;
  std::vector<Tensor> captures_;
};

// What a call writes, in such memory.
class PlacedOutputs {
 public:
  PlacedOutputs(const AttentionDesc& desc, const RunOptions& options, PlacedInputs& inputs);
  void give_to(ForwardArgs& args) const;
  Outputs result() const;

 private:
  Placed out_, logsumexp_, weights_, column_sums_;
};

class PlacedGradients {
 public:
  // Of the shapes of forward's inputs; they hold in.before, if they are to be added to.
  PlacedGradients(const AttentionDesc& desc, const ForwardArgs& forward, const BackwardInputs& in, GradientSet asked,
                  const RunOptions& options, PlacedInputs& inputs);
  void give_to(BackwardArgs& args) const;  // args.grad_captures: in memory of this object's
  Gradients result() const;

 private:
  std::deque<Placed> of_, of_captures_;
  std::vector<Tensor> captures_;
};

// The reference in arithmetic of T (double or float). wide: results in float64, whatever their dtype should be.
template <class T>
Outputs reference_outputs(const AttentionDesc& desc, const Inputs& in, bool wide);

}  // namespace polyhead::testing
