// What has to hold in a model before anybody walks through it.
#pragma once

#include "polyhead/graph.h"

namespace polyhead::graph {

constexpr int64_t kNewestOpset = 28;

// Known opsets, one definition for each name, and nothing read that does not stand before its reader.
Status check_model(const Model& model);

// The version of ONNX's own operators that a model uses.
int64_t opset_of(const Model& model);

}  // namespace polyhead::graph
