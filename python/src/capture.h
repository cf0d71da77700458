// A tensor that a program captures, as the library wants it; the operators of torch share it.
#pragma once

#include <algorithm>

#include "polyhead/attention.h"

namespace polyhead::python {

// One of 0 dims, a single number, has one of size 1 for the library.
inline Tensor as_capture(Tensor given) {
  if (given.ndim > 0) return given;
  given.ndim = 1;
  given.dims[0] = given.strides[0] = 1;
  return given;
}

// What a plan is told of it.
inline CaptureShape capture_shape(const Tensor& capture) {
  CaptureShape shape{.dtype = capture.dtype, .ndim = capture.ndim};
  std::copy_n(capture.dims, capture.ndim, shape.dims);
  return shape;
}

}  // namespace polyhead::python
