// polyhead.onnx.fuse: models as bytes.
#pragma once

#include <nanobind/nanobind.h>

namespace polyhead::python {

// (model, folder, target, unseen_rows, layers) -> (model, has_external_data, candidates, products, (nodes, nodes after, opset,
// opset after)); both lists have (place, is_attention, fused, pattern, became, reason, saved_bytes)
nanobind::object fuse_model(nanobind::bytes model, nanobind::bytes folder, nanobind::str target,
                            nanobind::str unseen_rows, bool layers);

}  // namespace polyhead::python
