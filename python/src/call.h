// The arguments of polyhead.attention, as the library wants them.
#pragma once

#include <Python.h>

#include <array>
#include <string_view>

#include "arrays.h"
#include "polyhead/attention.h"

namespace polyhead::python {

// Positions in the argument list of _bind.attention and _bind.explain: polyhead.attention's own order.
enum Position : int {
  kQuery,
  kKey,
  kValue,
  kAttnBias,
  kAttnMask,
  kCausal,
  kWindow,
  kAlign,
  kQueryOffset,
  kScale,
  kSoftcap,
  kAlibiSlopes,
  kDropoutP,
  kDropoutSeed,
  kDropoutOffset,
  kSeqlensQ,
  kSeqlensK,
  kCuSeqlensQ,
  kCuSeqlensK,
  kReturnLogsumexp,
  kReturnWeights,
  kReturnColumnSums,
  kKernel,
  kNumPositions,
};

// One call, read from Python. The arguments must outlive it. Raises polyhead.Error or TypeError.
class Call {
 public:
  explicit Call(PyObject* const* arguments);

  const AttentionDesc& desc() const { return desc_; }
  std::string_view kernel() const { return kernel_; }

  // Makes the outputs and computes them, without the GIL. What polyhead.attention returns.
  nb::object run(const Plan& plan);

 private:
  Tensor optional_array(Position position, const ArrayArgument& argument);
  void read_operands();
  void read_broadcast(Position position, const ArrayArgument& argument, Tensor& view, BroadcastOperand& operand);
  void read_positions();
  void read_scores();
  void read_lengths();
  void read_results();

  PyObject* const* arguments_;
  AttentionDesc desc_;
  ForwardArgs args_;
  bool return_logsumexp_ = false;
  std::string_view kernel_;
  std::array<Held, kCuSeqlensK + 1> held_;
};

// Number arguments, by name for the sentence; also used by dropout_mask.
int64_t int64_argument(PyObject* object, const char* name, const char* takes = "an integer");
double real_argument(PyObject* object, const char* name);
uint64_t seed_argument(PyObject* object);            // 0 .. 2^64-1
uint32_t dropout_offset_argument(PyObject* object);  // 0 .. 2^32-1

}  // namespace polyhead::python
