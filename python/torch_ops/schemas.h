// The operators of torch.ops.polyhead, defined where this library is loaded: in processes without Python too.
#pragma once

namespace polyhead::torch_ops {

// The schema that torch did not take, or null.
const char* define_operators();

}  // namespace polyhead::torch_ops
