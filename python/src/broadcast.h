// NumPy's rule of broadcasting, for a mask, a bias and its gradient; the operators of torch share it.
#pragma once

#include "polyhead/attention.h"

namespace polyhead::python {

// The view with as many leading dimensions of size 1 as make it 4-D.
inline Tensor widened_to_4d(const Tensor& view) {
  Tensor wide = view;
  wide.ndim = 4;
  for (int i = 0; i < 4; ++i) {
    const int from = i - (4 - view.ndim);
    wide.dims[i] = from < 0 ? 1 : view.dims[from];
    wide.strides[i] = from < 0 ? 0 : view.strides[from];
  }
  return wide;
}

// What a plan is told of a 4-D view.
inline BroadcastOperand broadcast_operand(const Tensor& wide) {
  BroadcastOperand operand;
  operand.given = true;
  operand.dtype = wide.dtype;
  for (int i = 0; i < 4; ++i) operand.dims[i] = wide.dims[i];
  return operand;
}

}  // namespace polyhead::python
