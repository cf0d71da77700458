// The arguments that polyhead.attention, attention_backward and the layer share, as the library wants them.
#pragma once

#include <Python.h>

#include <array>
#include <string_view>

#include "arrays.h"
#include "broadcast.h"
#include "place.h"
#include "polyhead/attention.h"
#include "program_call.h"

namespace polyhead::python {

// Positions in the argument lists of _bind.attention, explain, attention_backward and of the layer (layer_call.h).
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
  kDropoutOrigin,
  kSeqlensQ,
  kSeqlensK,
  kCuSeqlensQ,
  kCuSeqlensK,
  kKernel,
  kDevice,
  kStream,
  kProgram,
  kCaptured,
  kSinkLogits,
  kNormalizer,
  kSinkKeys,
  kMaskAtEnd,
  kNumShared,
  // attention, explain
  kReturnLogsumexp = kNumShared,
  kReturnWeights,
  kReturnColumnSums,
  kOutDtype,
  kResult,
  kPageTable,
  kKeyScales,
  kValueScales,
  kNumForward,
  // attention_backward
  kGradOut = kNumShared,
  kOut,
  kLogsumexp,
  kGradLogsumexp,
  kNeeds,
  kInto,
  kAccumulate,
  kGradDtype,
  kNumBackward,
};

constexpr const char* kFloats = "float32, bfloat16, float16 or float64";

// The options of one call, read from Python. The arguments must outlive it. Raises polyhead.Error or TypeError.
class Options {
 public:
  const AttentionDesc& desc() const { return desc_; }
  std::string_view kernel() const { return kernel_; }
  const Where& where() const { return args_.where; }

 protected:
  explicit Options(PyObject* const* arguments) : arguments_(arguments) {}

  void read_options();
  // Completes where() by where query lies.
  void compute_at(const Place& place);
  Tensor optional_array(Position position, const ArrayArgument& argument);

  // args_.attn_bias with the dims that it came with, as its gradient has them.
  Tensor given_attn_bias() const;

  PyObject* const* arguments_;
  AttentionDesc desc_;
  ForwardArgs args_;  // the inputs
  Captures captures_;
  std::array<Held, kNumShared> held_;

 private:
  Tensor broadcast_operand(Position position, const ArrayArgument& argument, BroadcastOperand& operand);
  void read_positions();
  void read_scores();
  void read_lengths();
  void read_where();

  int attn_bias_ndim_ = 0;  // as given; args_.attn_bias has 4
  std::string_view kernel_;
};

// One call of attention, forward or backward.
class Call : public Options {
 protected:
  // cache: page_table, key_scales and value_scales, each or None; null: none of them.
  explicit Call(PyObject* const* arguments, PyObject* const* cache = nullptr);

  const Place place_;

 private:
  void read_operands(PyObject* const* cache);
  void check_packing(bool paged) const;

  Held held_page_table_, held_key_scales_, held_value_scales_;
};

// polyhead.attention's call; explain reads it too.
class ForwardCall : public Call {
 public:
  explicit ForwardCall(PyObject* const* arguments);

  const ForwardArgs& args() const { return args_; }  // the inputs
  bool on_cuda() const { return place_.on_cuda(); }

  // Makes the outputs and computes them, without the GIL. What polyhead.attention returns.
  nb::object run(const Plan& plan);

 private:
  void read_result();

  bool return_logsumexp_ = false;
  Held held_result_;
};

// None, False: none; True: of each head; "mean".
ReturnWeights return_weights_argument(PyObject* object);

}  // namespace polyhead::python
