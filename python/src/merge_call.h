// polyhead.merge and merge_backward.
#pragma once

#include "arrays.h"

namespace polyhead::python {

// (outs, logsumexps) -> (out, logsumexp)
nb::object merge_parts(PyObject* const* arguments);

// (grad_out, outs, logsumexps, out, logsumexp, grad_logsumexp) -> (a list of each outs[i]'s, of each logsumexps[i]'s)
nb::object merge_parts_backward(PyObject* const* arguments);

constexpr int kNumMerge = 2, kNumMergeBackward = 6;

}  // namespace polyhead::python
