// The attention block and the feed-forward block of polyhead._bind.
#pragma once

#include "arrays.h"

namespace polyhead::python {

// Arguments by position: those of polyhead/torch/_block_ops.py, but for batch_first. Absent tensors are None.
constexpr int kNumAttentionBlock = 28, kNumAttentionBlockBackward = 27 + 3;
constexpr int kNumFeedForward = 17, kNumFeedForwardBackward = 16 + 3;

// -> (out, attn_weights, reserve, kernel); what was not asked for is None
nb::object attention_block_arrays(PyObject* const* arguments);

// (those of the forward but for keep, grad_out, reserve, needs) -> (gradients, kernel): None where needs has no bit
nb::object attention_block_gradients(PyObject* const* arguments);

// -> (out, reserve, kernel)
nb::object feed_forward_arrays(PyObject* const* arguments);
nb::object feed_forward_gradients(PyObject* const* arguments);

}  // namespace polyhead::python
