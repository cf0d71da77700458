// Keys and values of a run behind those that a cache holds: past_key and past_value of the operators.
#pragma once

#include "call.h"

namespace polyhead::onnxruntime {

struct Cached {
  Tensor past;            // [batch, heads, sequence, dim]; not given: none
  Tensor fresh;           // [batch, sequence, heads, dim]
  Tensor all;             // the same dims: fresh itself, or memory for past and fresh, one behind the other
  bool is_copied = true;  // false: `all` is still to be written

  int64_t before() const { return past.given() ? past.dims[2] : 0; }
};

// Input `past`, named `what`, checked, and output `present`, or memory of the call where nobody reads that.
Status read_cached(Call& call, size_t past, size_t present, const char* what, const Tensor& fresh, Cached& cached);

// Writes `all`.
void append(Executor& executor, Cached& cached);

// Appends, and attends: plans.forward() of args, whose key and value are parts of `all`.
Status append_and_attend(Call& call, Plans& plans, const AttentionDesc& desc, ForwardArgs& args, Cached& keys,
                         Cached& values);

}  // namespace polyhead::onnxruntime
