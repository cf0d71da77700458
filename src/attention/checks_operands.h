// The tensors of a call, checked one by one and against each other: what the checks of forward and backward share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "core/layout.h"
#include "core/sentence.h"
#include "polyhead/attention.h"

namespace polyhead {

struct Dim {
  const char* name;
  int64_t size;
};
using Dims = std::initializer_list<Dim>;

enum class Role { kInput, kOutput, kGradient };

// One tensor by itself: given, dtype, device, dims, pointer and strides. Fills the range of bytes that it touches.
Status check_tensor(const char* name, const Tensor& t, DType dtype, Dims dims, MemoryRange* range);

// Whether the elements of what is written lie apart, and, but for gradients, in ascending order. Its memory has passed
// check_tensor.
Status check_writable(Role role, const char* name, const Tensor& t);

// The operands of one call, each checked as it is added; outputs, which come last, against all before them. Allocates
// nothing unless there is an error.
class Operands {
 public:
  explicit Operands(const AttentionDesc& desc) : desc_(desc) {}

  Status add(Role role, const char* name, const Tensor& t, DType dtype, Dims dims);

  // The shapes that several tensors have.
  Status add_query_like(Role role, const char* name, const Tensor& t);
  Status add_key_like(Role role, const char* name, const Tensor& t);
  Status add_value_like(Role role, const char* name, const Tensor& t);
  Status add_out_like(Role role, const char* name, const Tensor& t);
  Status add_logsumexp_like(Role role, const char* name, const Tensor& t);
  Status add_broadcast(Role role, const char* name, const Tensor& t, const BroadcastOperand& planned);
  Status add_slopes_like(Role role, const char* name, const Tensor& t);

  // Query, key, value and the options' tensors.
  Status add_inputs(const ForwardArgs& args);

  Status check_workspace(const void* data, size_t given_bytes, size_t needed_bytes) const;

 private:
  struct Operand {
    const char* name;
    const Tensor* tensor;
    MemoryRange range;
  };

  Status add_rows(Role role, const char* name, const Tensor& t, Dim rows, Dim heads, Dim dim);
  Status add_options(const ForwardArgs& args);
  Dim rows_q() const { return {desc_.packed ? "total_q" : "seqlen_q", desc_.seqlen_q}; }
  Dim rows_k() const { return {desc_.packed ? "total_k" : "seqlen_k", desc_.seqlen_k}; }

  const AttentionDesc& desc_;
  static constexpr int kMaxOperands = 48;  // more than any call has: a layer's backward has 37
  Operand operands_[kMaxOperands];
  int count_ = 0;
};

// What returned sums and statistics are stored in.
inline DType sums_dtype(const AttentionDesc& desc) {
  return desc.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Refuses a tensor that the desc does not ask for.
Status unasked(const char* name, const Tensor& t);

}  // namespace polyhead
