// polyhead.onnx.fuse: models as bytes.
#pragma once

#include <nanobind/nanobind.h>

namespace polyhead::python {

// (model, folder, target, unseen_rows) -> (model, has_external_data, [(place, is_attention, fused, pattern, became, reason,
// saved_bytes)], (nodes, nodes after, opset, opset after))
nanobind::object fuse_model(nanobind::bytes model, nanobind::bytes folder, nanobind::str target,
                            nanobind::str unseen_rows);

}  // namespace polyhead::python
