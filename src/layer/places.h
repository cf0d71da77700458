// Tensors of a call, seen as a step wants them.
#pragma once

#include "layer/steps.h"

namespace polyhead {

// The tensor at a place of this call; not given, if it is nowhere.
Tensor tensor_at(const Call& call, const Place& place);

// t without its beam dim, as a tensor that has it: [batch, 1, ...]; `ndim`: with beam.
Tensor with_beam(const Tensor& t, int ndim);

// Beam n of a tensor without its dim 1; of the only beam there is, where all share it.
Tensor beam_of(const Tensor& t, int64_t n);

// Index i alone of a dim; where the dim has one index for all, the tensor itself.
Tensor index_of(const Tensor& t, int dim, int64_t i);

}  // namespace polyhead
